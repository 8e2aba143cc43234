"""torch's own tests of DistributedDataParallel, with gradwire attached to every module that they make.

    python -m tests.peer                                   # all of them, with 2 and 3 ranks
    python -m tests.peer --only test_ddp_uneven --world-size 3 --method none

The tests are those of the installed torch, imported from `torch.testing._internal.distributed`. Each runs twice on
CPU with Gloo: as it is (the baseline), and with gradwire attached. What passes the first way passes the second way,
apart from the differences that `differences.py` lists with their reasons. A listed difference that no longer shows
fails the run, like one that is not listed.

`suite.py` collects the tests, `on_cpu.py` lets tests for GPUs run on CPU, `attaching.py` attaches, `cell.py` is the
process that runs the tests of one world size one way, and `campaign.py` compares.
"""
