"""The adapter for DistributedDataParallel.

- `attach`, `handle`: the public call, and what it returns: averaging of buckets, report, state.
- `advice`: what a user can do about an error, or about a hook that is never called.
- `gathered`: the states of all ranks in one document.
- `hook_slot`, `wrappers`: the module's only communication hook; advice for modules that are not DDP.
- `optimizers`, `optimizer_state`, `clipping`: whose step commits which residuals; what `gcomp` reads of optimizers.
- `momentum`: the check that momentum is applied once. `loss_scale`: residuals follow the scale of a GradScaler.
- `memory_orders`: residuals fit the memory format of their parameters.

A step: `hook_slot` → `Handle.on_bucket` → `Synchronizer.submit` for each bucket. `Handle._end_backward` then waits and
raises errors. When the optimizer has stepped: `optimizers` → `Handle._after_step` → `Synchronizer.commit`.
"""
