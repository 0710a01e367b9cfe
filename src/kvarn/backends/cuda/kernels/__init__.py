"""Triton kernels, one per file. They are compiled by build.py; nothing else imports them."""
