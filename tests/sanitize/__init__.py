"""All GPU kernels under compute-sanitizer: `PYTHONPATH=src:tests python -m sanitize --out FOLDER`."""
