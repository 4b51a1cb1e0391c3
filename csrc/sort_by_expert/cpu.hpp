// The rows that tokens' choices of experts make, sorted by expert, those of one expert in the choices' order: a
// counting sort. chosen: [count]; kept: [count], or 0 if all are; slots: [count], the row of each choice; choice: the choice of
// each row; counts: [experts], the rows of each expert.
//
// Without `room` (negative) there are `count` rows, those of choices that are not kept last. With it, each expert has
// that many rows, and a choice that is not kept or finds no room has the slot experts * room; choice is -1 where no
// choice is.
#pragma once

#include <cstdint>

extern "C" {
void megazero_sort_by_expert(std::int64_t count, std::int64_t experts, std::int64_t room, const std::int64_t* chosen,
                             const std::uint8_t* kept, std::int64_t* choice, std::int64_t* slots, std::int64_t* counts);
}
