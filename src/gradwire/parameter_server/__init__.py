"""3LC's parameter server: messages, both ends without I/O, the process, its journal and the client."""
