"""What runs inside a serving process beside the patches: wiring, debug, dump."""
