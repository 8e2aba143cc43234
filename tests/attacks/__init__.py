"""Attacks on a running job over loopback, each bounded: what was sent, what the sender got, and what it cost the job.

python -m tests.attacks      the table in SECURITY.md, of what is measured there and then
"""
