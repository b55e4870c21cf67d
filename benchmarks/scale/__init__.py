"""Agents by the dozen before a real API server: parts of `benchmarks.bench_scale`."""
