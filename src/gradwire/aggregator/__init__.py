"""THC's aggregation server, whole: packets, both sides without I/O, process, client and strategy.

- `server`, `slot`: server without I/O (THC's pseudocode 1), and the sums of one packet.
- `worker`, `request`, `retransmission`: worker without I/O, its submissions, and its timers where packets can be lost.
- `packet`, `session`: bytes on the wire, and the configuration, join and welcome that both sides exchange.
- `process`, `client`: the same over TCP and UDP (`gradwire serve --aggregate`, and one client per rank).
- `shards`, `sharded_client`: several servers that share the packets of each stream.
- `strategy`, `codec`, `service`: strategy ``"server"``, its encoding and decoding, and `gw.Aggregator`.
"""
