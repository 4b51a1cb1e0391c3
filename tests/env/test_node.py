"""The facts of a node from recorded texts of the documented formats, and the problems that they show."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from megazero.env.nccl import BAD_VARIABLES
from megazero.env.node import (
    UNLIMITED,
    GpuState,
    KernelFacts,
    NodeFacts,
    Port,
    ProcessLimits,
    chosen_word,
    gpu_states,
    node_facts,
    nvlink_counts,
    rdma_ports,
)
from megazero.env.problems import find_problems
from megazero.env.report import report
from tests.env.test_env import ON_CPU, SOUND
from tests.tables import over_table

QUERY = """\
index, driver_version, pcie.link.gen.max, pcie.link.width.current, pcie.link.width.max, clocks.max.sm [MHz], \
power.limit [W], power.default_limit [W], persistence_mode, ecc.errors.uncorrected.volatile.total, \
remapped_rows.pending, mig.mode.current, clocks_throttle_reasons.hw_slowdown
0, 570.86.15, 5, 16, 16, 1980, 700.00, 700.00, Enabled, 0, No, Disabled, Not Active
1, 570.86.15, 5, 8, 16, 1980, 550.00, 700.00, Disabled, 3, Yes, Enabled, Active
2, 570.86.15, 5, 16, 16, 1755, [N/A], [N/A], Enabled, [N/A], [N/A], [N/A], [N/A]
"""
LINKS = """\
GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-1)
\t Link 0: 26.562 GB/s
\t Link 1: 26.562 GB/s
GPU 1: NVIDIA H100 80GB HBM3 (UUID: GPU-2)
\t Link 0: 26.562 GB/s
\t Link 1: <inactive>
"""


def test_the_state_of_gpus() -> None:
    first, second, third = gpu_states(QUERY)
    assert (first.index, first.values["driver_version"]) == (0, "570.86.15")
    assert (second.number("power.limit"), second.number("pcie.link.width.current")) == (550.0, 8.0)
    assert third.number("power.limit") is None
    assert third.values.get("mig.mode.current") is None
    assert gpu_states("") == ()
    assert gpu_states("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.\n") == ()


def test_links_between_gpus() -> None:
    assert nvlink_counts(LINKS) == {0: (2, 0), 1: (1, 1)}
    assert nvlink_counts("") == {}


def test_the_chosen_word() -> None:
    assert [chosen_word(text) for text in ("always [madvise] never", "", "x")] == ["madvise", "", ""]


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


TREE = {
    "proc/sys/kernel/osrelease": "6.8.0-45-generic\n",
    "proc/sys/kernel/numa_balancing": "1\n",
    "proc/cmdline": "BOOT_IMAGE=/vmlinuz root=/dev/sda intel_iommu=on\n",
    "proc/modules": "nvidia 9707520 10 - Live 0x0\next4 1 1 - Live 0x0\nmlx5_core 1 1 - Live 0x0\n",
    "sys/kernel/mm/transparent_hugepage/enabled": "always madvise [never]\n",
    "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor": "powersave\n",
    "sys/devices/system/cpu/cpu1/cpufreq/scaling_governor": "powersave\n",
    "sys/devices/system/node/node0/cpulist": "0-15\n",
    "sys/devices/system/node/node1/cpulist": "16-31\n",
    "sys/class/infiniband/mlx5_0/ports/1/state": "4: ACTIVE\n",
    "sys/class/infiniband/mlx5_0/ports/1/rate": "400 Gb/sec (4X NDR)\n",
    "sys/class/infiniband/mlx5_0/ports/1/link_layer": "InfiniBand\n",
    "sys/class/infiniband/mlx5_1/ports/1/state": "1: DOWN\n",
    "sys/class/infiniband/mlx5_1/ports/1/rate": "10 Gb/sec (4X SDR)\n",
    "sys/class/infiniband/mlx5_1/ports/1/link_layer": "InfiniBand\n",
}
PORTS = (
    Port("mlx5_0 port 1", "ACTIVE", 400.0, "InfiniBand"),
    Port("mlx5_1 port 1", "DOWN", 10.0, "InfiniBand"),
)


def test_a_recorded_machine(tmp_path) -> None:
    asked = []

    def output(*command: str) -> str | None:
        asked.append(command)
        if "nvlink" in command:
            return LINKS
        # An old driver refuses the whole query for a column that it does not know.
        return None if "remapped_rows" in command[1] else QUERY

    facts = node_facts(output, "c0de", write(tmp_path, TREE), ProcessLimits(1024, 2048, 65536))
    assert facts == NodeFacts(
        code="c0de",
        limits=ProcessLimits(1024, 2048, 65536),
        gpus=gpu_states(QUERY),
        nvlinks={0: (2, 0), 1: (1, 1)},
        ports=PORTS,
        kernel=KernelFacts(
            release="6.8.0-45-generic",
            governors=("powersave",),
            numa_nodes=2,
            numa_balancing=True,
            huge_pages="never",
            command_line="BOOT_IMAGE=/vmlinuz root=/dev/sda intel_iommu=on",
            modules=("mlx5_core", "nvidia"),
        ),
    )
    assert len(asked) == 3
    found = {trouble.name for trouble in find_problems(replace(SOUND, node=facts))}
    assert found == {
        *("few_files", "few_processes", "memlock_limited", "nvlink_inactive", "port_down", "no_peermem"),
        *("gpus_differ", "pcie_narrow", "power_capped", "gpu_slowed", "ecc_errors", "rows_to_remap"),
        *("persistence_off", "mig_on", "governor", "numa_balancing", "no_huge_pages", "iommu"),
    }


def test_a_machine_that_tells_nothing(tmp_path) -> None:
    facts = node_facts(lambda *command: None, "c0de", tmp_path, ProcessLimits())
    assert replace(facts, kernel=KernelFacts()) == NodeFacts(code="c0de")
    assert find_problems(replace(SOUND, node=facts)) == ()
    assert rdma_ports(tmp_path) == ()


def node(**facts):
    return replace(SOUND, node=NodeFacts(**facts))


def gpu(**values):
    names = {"pending": "remapped_rows.pending", "errors": "ecc.errors.uncorrected.volatile.total"}
    return node(gpus=(GpuState(2, {names.get(k, k.replace("__", ".")): v for k, v in values.items()}),))


UP, DOWN = PORTS
PEERMEM = KernelFacts(modules=("nvidia_peermem",))
SENTENCES = [
    (
        replace(SOUND, memory=replace(SOUND.memory, shared=64 << 20)),
        True,
        "/dev/shm must have 512 MiB for 8 ranks, but has 64 MiB; start the container with "
        "`docker run --ipc=host` or `docker run --shm-size=16g` [shm_small]",
    ),
    (
        replace(ON_CPU, memory=replace(SOUND.memory, shared=64 << 20)),
        False,
        "/dev/shm must have 512 MiB for 8 ranks, but has 64 MiB; start the container with "
        "`docker run --ipc=host` or `docker run --shm-size=16g` [shm_small]",
    ),
    (
        node(limits=ProcessLimits(files=1024)),
        False,
        "the limit of open files must be at least 4096, but is 1024; run `ulimit -n 65536`, and set it in "
        "/etc/security/limits.conf [few_files]",
    ),
    (
        node(limits=ProcessLimits(locked=64 << 10), ports=(UP,)),
        True,
        "the limit of locked memory must be unlimited where RDMA devices register buffers, but "
        "is 64 KiB; run "
        "`ulimit -l unlimited`, or `docker run --ulimit memlock=-1` for a container [memlock_limited]",
    ),
    (
        node(nvlinks={0: (18, 0), 1: (12, 6)}),
        False,
        "GPU 1 must have 18 active NVLinks, as others here, but has 12 and 6 inactive; look at "
        "`nvidia-smi nvlink "
        "--status` and at the fabric manager's log, and reset the GPU [nvlink_inactive]",
    ),
    (
        node(ports=(UP, DOWN)),
        False,
        "mlx5_1 port 1 must be ACTIVE, as others here, but is DOWN; look at its cable and "
        "switch, or leave it out by "
        "NCCL_IB_HCA [port_down]",
    ),
    (
        node(ports=(UP, replace(UP, name="mlx5_2 port 1", rate=200.0))),
        False,
        "mlx5_2 port 1 must run at 400 Gb/s, as others here, but runs at 200; look at its cable "
        "and switch, or leave "
        "it out by NCCL_IB_HCA [port_slow]",
    ),
    (
        node(ports=(DOWN,)),
        False,
        "a port of the 1 RDMA devices must be ACTIVE, but none is; start the subnet manager or "
        "look at the cables; "
        "until then messages between nodes go over TCP [no_port_up]",
    ),
    (
        gpu(errors="3"),
        True,
        "GPU 2 must have no uncorrected memory error since its start, but has 3; run "
        "`nvidia-smi --gpu-reset -i 2`, "
        "and have it replaced if they come back [ecc_errors]",
    ),
    (
        gpu(power__limit="550.00", power__default_limit="700.00"),
        False,
        "GPU 2 must be allowed its 700 W, but is limited to 550 W; run `nvidia-smi -i 2 -pl "
        "700` unless the limit is "
        "wanted: clocks follow it [power_capped]",
    ),
    (
        node(kernel=KernelFacts(numa_balancing=True, numa_nodes=2)),
        False,
        "the kernel must leave pages in their domain of memory (2 here), but moves them; run `sysctl "
        "kernel.numa_balancing=0`: ranks stall while their pages are unmapped [numa_balancing]",
    ),
]


@over_table(("env", "stops", "text"), SENTENCES)
def test_a_problem_of_a_node_is_named_alone_with_its_remedy(env, stops: bool, text: str) -> None:
    (trouble,) = find_problems(env)
    assert str(trouble) == text
    assert trouble.stops is stops


@over_table(
    "env",
    [
        node(
            limits=ProcessLimits(UNLIMITED, UNLIMITED, 64 << 10)
        ),  # without RDMA, locked memory is of no use
        node(
            ports=(UP, replace(UP, name="eth", layer="Ethernet", rate=25.0)),
            kernel=PEERMEM,
        ),
        node(kernel=KernelFacts(numa_balancing=True)),
        node(nvlinks={0: (0, 4), 1: (0, 4)}),  # PCIe cards with bridges that nobody plugged in
        replace(SOUND, ranks=1, memory=replace(SOUND.memory, shared=64 << 20)),
        gpu(errors="0", pending="No", persistence_mode="Enabled"),
    ],
)
def test_nothing_is_said_where_nothing_is_wrong(env) -> None:
    assert find_problems(env) == ()


def variables(env=SOUND, **values: str):
    return replace(env, variables=values, interfaces={"lo": "up", "eth0": "up", "ib0": "up"})


@over_table("row", BAD_VARIABLES, ids=lambda row: row.name)
def test_each_known_bad_setting_is_named_alone(row) -> None:
    bad = next(value for value in ("1", "0", "LL128", "TRACE", "DETAIL") if row.bad(value.lower()))
    env = replace(SOUND, node=NodeFacts(ports=(UP,), kernel=PEERMEM))
    (trouble,) = find_problems(variables(env, **{row.name: bad}))
    assert str(trouble) == (
        f"`{row.name}` must be left out of a training, but is {bad}: {row.why}; run `unset {row.name}` "
        f"[variable_{row.name.lower()}]"
    )
    fine = next((value for value in ("0", "1", "INFO", "") if not row.bad(value.lower())), None)
    assert fine is not None
    assert find_problems(variables(env, **{row.name: fine})) == ()


@over_table(
    ("name", "value", "problem"),
    [
        ("NCCL_SOCKET_IFNAME", "eth", None),
        ("NCCL_SOCKET_IFNAME", "=eth0", None),
        ("NCCL_SOCKET_IFNAME", "^docker,lo", None),
        ("NCCL_SOCKET_IFNAME", "=eth", "no_such_interface"),
        ("NCCL_SOCKET_IFNAME", "bond0", "no_such_interface"),
        ("NCCL_SOCKET_IFNAME", "lo", "local_interface"),
        ("GLOO_SOCKET_IFNAME", "eth0", None),
        ("GLOO_SOCKET_IFNAME", "eth", "no_such_interface"),
        ("NCCL_IB_HCA", "mlx5_0:1", None),
        ("NCCL_IB_HCA", "mlx5", None),
        ("NCCL_IB_HCA", "bnxt_re0", "no_such_adapter"),
    ],
)
def test_devices_that_variables_name(name: str, value: str, problem: str | None) -> None:
    env = replace(SOUND, node=NodeFacts(ports=(UP,), kernel=PEERMEM))
    assert [trouble.name for trouble in find_problems(variables(env, **{name: value}))] == [problem] * (
        problem is not None
    )


def test_the_report_has_the_node() -> None:
    text = report(node(gpus=gpu_states(QUERY)[:1], nvlinks={0: (18, 0)}, limits=ProcessLimits(1 << 20)))
    rows = {line[:26].strip(): line[26:] for line in text.splitlines() if line[:2] == "  "}
    assert rows["limits"] == "open files 1048576, processes unlimited, locked memory unlimited"
    assert rows["NVLinks of GPU 0"] == "18 active, 0 inactive"
    assert "SM up to 1980 MHz, 700.00 of 700.00 W, 0 memory errors" in text
