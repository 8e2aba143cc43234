"""Made-up machines for the planner's tests."""

from hypothesis import strategies as st

from gradwire.planner.costs import CodecCosts, Costs, LinkCosts
from gradwire.planner.curves import LinearCost
from gradwire.planner.fidelity import EVERYWHERE, FEW_ENCODES, RankedCompressor

SPECS = ("none", "half", "bit", "lanes", "stats")
METHODS = (
    RankedCompressor("half", EVERYWHERE),
    RankedCompressor("bit", FEW_ENCODES),
    RankedCompressor("lanes", EVERYWHERE),
    RankedCompressor("stats", FEW_ENCODES),
)


def codecs(speed=1.0, fixed=1e-5):
    """Codecs that are `speed` times as slow as about one core."""

    def line(slope):
        return LinearCost(fixed * speed, slope * speed)

    def codec(encode, decode, merge, nbytes, **more):
        return CodecCosts(line(encode), line(decode), line(merge), nbytes, **more)

    sums = {"accumulate": line(1e-10), "finalize": line(1e-10), "accumulator_bytes": LinearCost(0, 2)}
    stats = {"stats": line(1e-10), "stats_bytes": LinearCost(4, 0)}
    return {
        "none": codec(1e-10, 1e-10, 1e-10, LinearCost(0, 4)),
        "lossless": codec(1.4e-9, 8e-10, 8e-10, LinearCost(8, 3.4)),
        "half": codec(2e-10, 1e-10, 1e-10, LinearCost(0, 2)),
        "bit": codec(4e-10, 1e-10, 5e-11, LinearCost(8, 0.125)),
        "lanes": codec(3e-10, 2e-10, 1e-10, LinearCost(0, 1), **sums, **stats),
        "stats": codec(5e-10, 2e-10, 1e-10, LinearCost(0, 0.2), **stats),
    }


def costs(world_size=4, rate=1e9, latency=1e-4, speed=1.0, **more):
    """A job with links of `rate` bits a second."""
    link = LinkCosts(latency, 8 / rate)
    given = {"add": LinearCost(0, 1e-10 * speed), "task": 1e-5 * speed, "codecs": codecs(speed)}
    return Costs(world_size, (link,), **(given | more))


any_costs = st.builds(
    costs,
    world_size=st.integers(2, 64),
    rate=st.floats(1e7, 1e11),
    latency=st.floats(0, 1e-2),
    speed=st.floats(0.01, 10),
)
