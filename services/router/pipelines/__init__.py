"""Pipelines: one async function for each kind, run once for each request, over calls to stages."""
