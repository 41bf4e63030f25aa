"""The load of `fastgen bench` and other loads on several servers or engines in turn."""
