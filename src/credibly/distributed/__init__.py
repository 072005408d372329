"""The processes of a run: rendezvous, sharding of chains and rows, collective calls, heartbeats and failures."""
