"""The demo: every method on four small tasks, compared with HMC, as one page."""
