"""The measurement of `nodeagent status` (`benchmarks.bench_cli`)."""
