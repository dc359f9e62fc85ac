"""Reports for people: what a run is doing and what came out of it, on a terminal or in a log."""
