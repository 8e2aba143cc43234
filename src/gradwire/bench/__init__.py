"""Benchmarks of kernels, compressors and training, and `gradwire probe`.

- `kernels`, `compressors`: without a network; `measure` times calls, `rivals` are plain torch versions.
- `training`, `launch`, `job`, `worker`, `rank`: the training benchmark, its processes, and the protocol with them.
- `segment`, `recording`, `replay`, `timing`: what a rank does: train, record and replay a backward pass, time steps.
- `methods`: DDP's own methods and ours. `workload`, `workloads`, `text`, `deep`, `digits`: models and data.
- `results`, `statistics`, `records`, `table`, `plots`, `report`, `progress`, `environment`: figures and their output.
- `probe`, `probe_job`, `probe_steps`, `advice`, `timeline`: `gradwire probe`, and the steps of `gradwire plan`.
- `users`, `extras`: user code, and packages that only the tools need.

A figure: `training` → `launch` → `worker` → `segment` or `replay` → `results` → `records`, `table`, `report`.
"""
