// Rows chosen by number, and others in between: how layers see some tokens of a sequence under random-LTD (Yao et al.
// 2022), and how these return among the others. out[i] = source[numbers[i]], or otherwise[i] where numbers[i] is
// negative. source: [available, width]; numbers: int64 [count]; otherwise, out: [count, width].
#include "common/cuda_copies.hpp"

namespace megazero {

template <typename T, int N>
__global__ void __launch_bounds__(kCopyThreads)
    chosen_rows(CopiedRows<T, N> rows, std::int64_t available, Cached<std::int64_t> numbers) {
  const std::int64_t unchosen = rows.otherwise ? kOtherwise : kZeros;
  copy_rows(rows, [&](std::int64_t row) {
    const std::int64_t number = numbers[row];
    if (number < 0) return unchosen;
    if (!rows.source) return kZeros;
    return number < available ? number : kNowhere;
  });
}

}  // namespace megazero

using namespace megazero;

// source and otherwise may be null: zeros. A number from `available` on gives a row of NaN.
extern "C" int megazero_cuda_chosen_rows(std::int64_t count, std::int64_t row_bytes, std::int64_t available,
                                         const void* source, const std::int64_t* numbers, const void* otherwise,
                                         void* out, void* stream) {
  const auto start = [&](auto element, auto pack, const auto& rows, CopyLaunch launch) {
    return MEGAZERO_LAUNCH((chosen_rows<decltype(element), pack()>), launch.blocks, launch.threads, 0, stream, rows,
                           available, numbers);
  };
  return with_copied_rows(count, row_bytes, source, otherwise, out, start);
}
MEGAZERO_EXPORT(chosen_rows)
