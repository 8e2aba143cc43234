"""A laptop-sized network: a namespace a host, each link shaped."""
