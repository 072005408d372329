"""Run folders on disk: files, manifest, lock, and draws that stay there."""
