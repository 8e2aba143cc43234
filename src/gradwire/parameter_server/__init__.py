"""3LC's parameter server: messages, both ends without I/O, the process, its journal and the client.

- `client`, `options`, `arguments`: `gw.ParameterClient`, its options, and what follows from model and optimizer.
- `chunks`, `connection`, `slot`: the server of each chunk, a worker's conversation with it, and one chunk without I/O.
- `encoder_thread`, `forward_pulls`: encode during the backward pass, and update parameters before they are read.
- `session`, `update`: what both ends agree on before the first push, and updates on the wire.
- `process`, `server`: the server's loop, and its state machine without I/O.
- `shared_updates`: updates for all workers at their versions.
- `round`, `shard`: the open step of one parameter, and the parameters with their optimizers.
- `report`: what a worker has sent, received and lost.
- `journal`, `checkpoint`, `records`, `folder`: the server's state on disk.

A gradient: `client` → `encoder_thread` → `connection` → `slot` → `process` → `server` → `round`. When enough
workers have pushed, `shard` steps the optimizer and encodes the change. The `update` goes back to each `slot`.
"""
