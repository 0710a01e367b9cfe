"""The sections of bench/gpu_proof.py, one per module, and what they share: report, site, driving, models."""
