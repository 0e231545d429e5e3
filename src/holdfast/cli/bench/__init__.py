"""What `holdfast bench` measures with: cases, runners, suites, results and the report. See docs/benchmarking.md."""
