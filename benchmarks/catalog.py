"""All benchmarks, each with its question, its command, and its record."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

RESULTS = Path("benchmarks/results")
README = Path("benchmarks/README.md")
BEGIN, END = "<!-- index: begin -->", "<!-- index: end -->"


@dataclass(frozen=True)
class Benchmark:
    """One benchmark.

    Attributes:
        name: Name of the benchmark, and stem of its record.
        question: Question that it answers, for the index.
        module: Module in `benchmarks`; empty if it is a command of gradwire.
        arguments: Required options.
        stands_for: Command of gradwire that it runs; empty if it has a module.
        presets: Defaults of the module's options under this name.
        recorded: Whether its figures are kept in the repository.
    """

    name: str
    question: str
    module: str = ""
    arguments: str = ""
    stands_for: str = ""
    presets: Mapping[str, Any] = field(default_factory=dict)
    recorded: bool = True

    @property
    def record(self) -> Path | None:
        """File of the figures."""
        return RESULTS / f"{self.name}.csv" if self.recorded else None

    @property
    def command(self) -> str:
        """What to type."""
        return f"python -m benchmarks run {self.name} {self.arguments}".rstrip()


def _gradwire(name: str, question: str, arguments: str) -> Benchmark:
    return Benchmark(name, question, stands_for=f"gradwire bench {arguments} --csv {RESULTS}/{name}.csv")


_CODECS = (
    _gradwire("kernels", "How fast is every CPU kernel, against a copy of the same memory?", "kernels"),
    _gradwire("compressors", "How fast do compressors encode and decode, against a copy and torch?", "compressors"),
    _gradwire("lossless", "How fast is `lossless`, with prefix codes and fixed ones?", "compressors --only lossless"),
    _gradwire("thc-kernels", "How fast are THC's kernels, such as the Hadamard transform?", "kernels --only thc"),
    Benchmark(
        "list-decoding", "How much faster is decoding of lists at commit fa93654 than at ec7a283? Two runs in turns.",
        arguments="--only NAME --csv FILE", stands_for="gradwire bench compressors",
    ),
)  # fmt: skip
_MANY = "ddp-fp32,ddp-fp16,none,threelc,onebit,topk,int8,qsgd,natural,tbq,randomk"
_TRAINING = (
    Benchmark(
        "demo", "What do a few methods gain in a real training at 100 Mb/s?",
        stands_for=f"gradwire demo --full --csv {RESULTS}/demo.csv",
    ),
    _gradwire(
        "replay-text", "What is a step worth when cores do not limit it?",
        "training --replay --rates 100mbit,1gbit --seconds 5",
    ),
    _gradwire(
        "many-tensors-blocks", "What do methods gain with 454 tensors of at most 16 KiB?",
        f"training --replay --rates none,100mbit --workload blocks --steps 0 --seconds 4 --methods {_MANY}",
    ),
    _gradwire(
        "many-tensors-deep", "... with 389 tensors of 9 MB in all?",
        "training --replay --rates none,100mbit --workload deep --steps 0 --seconds 4 "
        "--methods ddp-fp32,none,threelc,onebit,topk",
    ),
)  # fmt: skip
_MICRO = (
    Benchmark(
        "transport", "How fast are frames over loopback, with checksums or tags, against bare sockets?",
        "micro.transport", recorded=False
    ),
    Benchmark(
        "protection", "What do checksums, tags, TLS and files on disk cost a step with a parameter server?",
        "micro.protection",
    ),
    Benchmark(
        "server-link",
        "How busy is a parameter server's link, how do workers share it, and what do receive buffers change?",
        "micro.server_link",
    ),
    Benchmark(
        "aggregation-server", "How many bytes a second does an aggregation server add on one core, over TCP and UDP?",
        "micro.aggregation_server",
    ),
    Benchmark(
        "receiving-threads", "What does an aggregation server gain by a second receiving thread, or a second server?",
        "micro.receiving_threads", recorded=False,
    ),
    Benchmark(
        "xdp-packets", "How long does the aggregator in the kernel (XDP) take for a packet, against Python's?",
        "micro.xdp_packets",
    ),
    Benchmark(
        "xdp-throughput", "How many contributions a second does it add up over interfaces, against Python's over UDP?",
        "micro.xdp_throughput",
    ),
    Benchmark(
        "auto-at-rest", "What does `auto` cost while DDP's own all-reduce is the fastest?", "micro.auto_at_rest",
    ),
    Benchmark(
        "hundred-tensors", "How much processor time does it take to synchronize 100 tensors of 64 × 64, in memory?",
        "micro.hundred_tensors",
    ),
    Benchmark(
        "norm-watch",
        "How often does the norm watch raise a false alarm, which injected faults does it see, and what does it cost?",
        "micro.norm_watch", recorded=False,
    ),
    Benchmark("two-threads", "What does a second computation thread gain?", "micro.two_threads"),
    Benchmark(
        "memory", "How much memory does a rank with 100 million parameters need above DDP's, and how long is its step?",
        "micro.memory",
    ),
    Benchmark(
        "lossless-rivals", "How do `lossless` and `gcomp` compare with zstd, zlib, and ZipNN?", "micro.lossless_rivals"
    ),
)  # fmt: skip
_PLANNING = (
    Benchmark("changing-link", "How soon does `auto` notice that links changed under a job?", "planning.changing_link"),
    Benchmark(
        "auto-simulated", "Is `auto` ever slower than DDP at 10 to 100 Gb/s, in simulation?", "planning.auto_simulated"
    ),
    Benchmark(
        "never-slower",
        "Is `auto` ever slower than DDP, in six runs in turns, for four models at four rates?",
        "planning.never_slower",
        "--data FOLDER",
    ),
    Benchmark(
        "powersgd",
        "... and `powersgd` than torch's PowerSGD hook of the same rank?",
        "planning.never_slower",
        "--data FOLDER",
        presets={"method": "powersgd", "rivals": "ddp-powersgd", "rates": "none,1gbit,100mbit"},
    ),
    Benchmark(
        "device-counts",
        "How many launches, operations and bytes does generated GPU code take?",
        "planning.device_counts",
        recorded=False,
    ),
    Benchmark(
        "device-times",
        "How long does generated GPU code take, against a copy and the sum of its counted parts?",
        "planning.device_times",
    ),
    Benchmark("simulator-error", "How far is the simulator from the lab?", "planning.simulator_error"),
)
_ACCURACY = (
    Benchmark(
        "time-to-accuracy", "How much sooner does each method reach the loss of DDP fp32, in whole trainings?",
        "accuracy.time_to_accuracy", "--data FOLDER",
    ),
)  # fmt: skip
_THREELC = (
    Benchmark(
        "threelc", "How do 3LC and its rivals learn and run through a parameter server? (tables 1, 2, figures 4 to 9)",
        "papers.threelc.training", "--data FOLDER",
    ),
    Benchmark(
        "threelc-epochs", "Does 3LC learn as well as float over many epochs? (table 1, figures 4 to 8)",
        "papers.threelc.epochs", "--data FOLDER",
    ),
    Benchmark(
        "threelc-entropy", "What would a prefix code gain instead of zero runs? (section 3.3)",
        "papers.threelc.entropy", "--data FOLDER",
    ),
)  # fmt: skip
_HIPRESS = (
    Benchmark("hipress-table7", "What to compress, in how many partitions? (table 7)", "papers.hipress.table7"),
    Benchmark(
        "breakdown", "What do generated code, pipelining, batches, and the planner gain? (figure 11)",
        "papers.hipress.breakdown",
    ),
    Benchmark(
        "step-ablation", "What do batch compression, tensor fusion, and computation threads gain, each by itself?",
        "papers.hipress.step_ablation",
    ),
    Benchmark("sweeps", "How do step times depend on rate, ratio, and width? (figure 12)", "papers.hipress.sweeps"),
    Benchmark(
        "convergence-wikitext2", "How does an LSTM converge, by step and by time? (figure 13)",
        "papers.hipress.convergence", "--data FOLDER",
    ),
    Benchmark(
        "scaling", "How do its models scale to 16 and 64 nodes, in simulation? (figure 7)", "papers.hipress.scaling",
        "--nodes 16,64",
    ),
    Benchmark("coordinator", "What would a bulk coordinator gain, in simulation?", "papers.hipress.coordinator"),
    Benchmark(
        "coordinator-losses", "... and time slots, where the switch has small buffers?", "papers.hipress.coordinator",
        presets={"queue": "64kib", "num_ranks": "4,8"},
    ),
    Benchmark("incast", "What do time slots gain under incast, with 8 hosts in the lab?", "papers.hipress.incast"),
)  # fmt: skip
_DELICIOUS = "benchmarks.papers.dragonn.extreme_classification.Delicious"
_DRAGONN = (
    Benchmark("sparse-encode", "How fast do sparsifiers encode and decode? (figure 5)", "papers.dragonn.encode"),
    Benchmark(
        "sparse-ablation-text", "What do hashing, tensor selection, and sparse decoding gain? (figure 6)",
        "papers.dragonn.ablation",
    ),
    Benchmark(
        "sparse-ablation-deep", "... with hundreds of small tensors?", "papers.dragonn.ablation",
        presets={"workload": "deep"},
    ),
    Benchmark(
        "sparse-ablation-extreme-classification", "... with one large layer?", "papers.dragonn.ablation",
        "--data FOLDER", presets={"workload": _DELICIOUS},
    ),
    Benchmark(
        "extreme-classification", "How do sparsifiers learn a wide last layer? (figure 7, table 2)",
        "papers.dragonn.extreme_classification", "--data FOLDER",
    ),
    Benchmark("vision", "... and a ResNet? (figures 3 and 4)", "papers.dragonn.vision", "--data FOLDER"),
    Benchmark("sparse-ratios-text", "How does speed depend on the ratio? (figure 8)", "papers.dragonn.ratios"),
    Benchmark("zen", "What do balanced sparse sums gain over all-gather, with 8 to 128 ranks?", "papers.dragonn.zen"),
)  # fmt: skip
_THC = (
    Benchmark("thc-nmse", "How large is THC's error, by bits and granularity? (figures 2b and 15)", "papers.thc.nmse"),
    Benchmark(
        "thc-scale", "How does accuracy change as workers are added? (figure 10)", "papers.thc.scale", "--data FOLDER"
    ),
    Benchmark(
        "thc-loss", "... under packet loss and with stragglers? (figures 11 and 16)", "papers.thc.loss", "--data FOLDER"
    ),
    Benchmark(
        "thc-ablation", "... without rotation, feedback, or table? (figure 14)", "papers.thc.ablation",
        "--sst2 FOLDER --cifar10 FOLDER",
    ),
    Benchmark(
        "thc-lab", "Where does a round's time go, and when is an accuracy reached? (figures 2a and 5 to 8)",
        "papers.thc.lab",
    ),
    Benchmark(
        "thc-servers",
        "... with results by multicast, sums in the kernel (XDP), and a server's link as wide as all others together?",
        "papers.thc.lab_servers",
    ),
    Benchmark(
        "thc-simulated",
        "How fast would seven models and ResNets train on 4 and 8 machines, simulated? (figures 6, 9, 12, 13)",
        "papers.thc.simulated",
    ),
)  # fmt: skip
_TRAININGS = "--cifar10 FOLDER --sst2 FOLDER"
_GCOMP = (
    Benchmark(
        "gcomp-gradients", "What does each part of `gcomp` make of real gradients? (figures 9, 12, 13, 14)",
        "papers.gcomp.gradients", _TRAININGS,
    ),
    Benchmark(
        "gcomp-zeros", "What do embeddings and ReLUs without normalization gain by zeros? (figure 3b)",
        "papers.gcomp.zeros", _TRAININGS,
    ),
    Benchmark(
        "gcomp-model-codes", "What would codes from a model of the distribution gain over counted ones?",
        "papers.gcomp.model_codes", _TRAININGS,
    ),
    Benchmark("gcomp-payloads", "What does a rank send, with levels derived and sent?", "papers.gcomp.payloads"),
    Benchmark("allreduce", "How long does one all-reduce take, against Gloo? (figure 10)", "papers.gcomp.allreduce"),
    Benchmark(
        "gcomp-lab", "How fast are iterations, and when is a loss reached? (figures 11, 15, 16, 20)", "papers.gcomp.lab"
    ),
    Benchmark(
        "gcomp-scaling", "How do ResNet-50 and BERT scale to 128 nodes, in simulation? (figures 15 to 17)",
        "papers.gcomp.scaling",
    ),
    Benchmark(
        "gcomp-loss", "How far are losses from those of exact sums? (figures 18, 19)", "papers.gcomp.loss", _TRAININGS
    ),
    Benchmark(
        "gcomp-orders", "... and is that within the spread of exact sums in other orders?", "papers.gcomp.orders",
        _TRAININGS,
    ),
    Benchmark("gcomp-drift", "How far do parameters drift, by optimizer?", "papers.gcomp.drift"),
    Benchmark(
        "gcomp-hops", "What does encoding at every hop do to an update, with 2 to 128 ranks?",
        "papers.gcomp.hops", "--cifar10 FOLDER",
    ),
    Benchmark(
        "gcomp-moments", "What if the metric includes the moments? (section 8)", "papers.gcomp.moments", _TRAININGS
    ),
)  # fmt: skip

SECTIONS: dict[str, tuple[Benchmark, ...]] = {
    "Codecs": _CODECS,
    "Training": _TRAINING,
    "[Time to equal accuracy](accuracy/README.md)": _ACCURACY,
    "Servers, transport, other libraries": _MICRO,
    "Planner, `auto`, simulator": _PLANNING,
    "[3LC](papers/threelc/README.md)": _THREELC,
    "[HiPress](papers/hipress/README.md)": _HIPRESS,
    "[DRAGONN](papers/dragonn/README.md)": _DRAGONN,
    "[THC](papers/thc/README.md)": _THC,
    "[GCOMP](papers/gcomp/README.md)": _GCOMP,
}
BENCHMARKS = {each.name: each for section in SECTIONS.values() for each in section}


def index() -> str:
    """The table of all benchmarks in Markdown."""
    lines = ["| question | command | record |", "|---|---|---|"]
    for title, section in SECTIONS.items():
        lines.append(f"| **{title}** | | |")
        for each in section:
            record = f"[{each.record.name}](results/{each.record.name})" if each.record else "printed"
            lines.append(f"| {each.question} | `{each.command}` | {record} |")
    return "\n".join(lines)


def in_readme(text: str) -> str:
    """The README with the present index."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{index()}\n{END}{after}"
