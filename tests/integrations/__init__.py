"""Tests with real libraries."""
