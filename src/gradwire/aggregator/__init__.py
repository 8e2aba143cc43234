"""THC's aggregation server: messages, both ends without I/O, the process, the client and the strategy."""
