"""The router: the only process that clients talk to. It forwards bytes between stages and never imports torch."""
