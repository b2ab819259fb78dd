"""Programs around the server: bootstrap, benchmarks, checks."""
