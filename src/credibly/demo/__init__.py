"""The demo: every method on four small tasks, each measured against HMC, as one page."""
