"""Connections between ranks, and between workers and servers.

- `loop`: the one thread that serves all connections of an end. `link`: one connection; `conversation`: the meaning of
  its frames; `stream`: its bytes; `liveness`: its timers; `closing`: its end.
- `transport`, `tcp`: what `sync` uses, and the mesh of ranks, in which a lost peer ends the group.
- `reconnecting`: ends whose peers may come back. `server`, `client`: the bases of stand-alone servers and of their
  workers' ends.
- `rendezvous`, `store`, `address`, `keys`: how ranks find each other, and the job key of jobs without a store.
- `acceptor`, `pending`, `handshake`: new connections, until both ends have proven the job key.
- `tls`: TLS between workers and servers.
- `datagrams`, `forks`: UDP packets with numbers and tags; forked children close their copies of connections.

A frame: `loop` → `link` → `conversation` → `stream`, and back, then `tcp._deliver` → `Callbacks.deliver`.
A lost peer: `link` → `loop` → `tcp._lose` → `Callbacks.fail` → `sync.engine` → `Handle._end_backward`, which raises.
"""
