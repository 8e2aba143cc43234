"""THC's aggregator in the kernel's packet path: programs written in Python, compiled by llvmlite, loaded by ctypes.

- `assembler`: writes a program as LLVM IR, and compiles it for the BPF architecture.
- `system`, `maps`, `loader`: the bpf system call, maps, and programs from object file to interface.
- `layout`, `guard`, `frames`: the memory that programs and Python share; checksums and tags; packet headers.
- `slot_program`, `program`: pseudocode 1 on one slot, and the XDP program around it.
- `copies`, `signatures`: the programs that send an answer to several workers, and sign it for each.
- `kernel_slots`: the maps of a session, filled from its configuration.
- `server`, `seals`: what remains for Python: joining, other packets, and datagrams with the same tags.
"""
