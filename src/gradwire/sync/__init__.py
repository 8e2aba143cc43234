"""CaSync: strategies, operations, engine and plan.

- `synchronizer`, `peers`, `options`: the public class, its base that knows ranks and engine only, and its options.
- `plan`, `plan_entry`: how each tensor travels. `agreement`, `tensor_registry`: what all ranks have agreed on.
- `submission`, `staging`, `launcher`, `job`: one call of `submit`, its flat CPU tensors, and the jobs made of them.
- `fusion`, `batch`: jobs of several tensors, and compiled calls for all tensors of a group.
- `strategies`, `operations`, `chunk`, `drawing`: turn a job into operations, once per plan, and print them.
- `codec`: what operations compute. `run`, `runtime`, `engine`: what a step fills in, and what runs it. `early_frames`,
  `waits`, `engine_errors`, `abort`: frames that nothing waits for yet, what is waited for and for how long, errors, and
  how a failure is told.
- `exchange`, `replica`, `nodes`, `group`: numbers of all ranks, the replica check, ranks of a node, the process group.
- `resize`, `warmup`: another number of ranks, and kernels before the first step.

A gradient: `Synchronizer.submit` → `launcher` → `build` of its strategy → `engine` → `codec` and `net.transport`.
"""
