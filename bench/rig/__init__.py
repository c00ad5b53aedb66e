"""What the benches stand on: a pair of real engines to drive, and the report that all of them print."""
