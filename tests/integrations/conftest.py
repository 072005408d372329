"""Tests with networks of other libraries, built from small configurations."""
