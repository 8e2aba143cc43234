"""Chaos over hours: jobs of real processes in the lab that are killed, frozen and restarted, on links that change.

- `campaign`, `__main__`: draw jobs by seed until the time is up, run them, and print what was found.
- `job`: processes of one job, its faults, and what is measured while it runs.
- `mesh`, `servers`: the kinds of jobs, each with a check of every value in the end.
- `programs`: what a process does.
"""
