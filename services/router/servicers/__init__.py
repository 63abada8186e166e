"""The router's public gRPC services: thin, from message to pipeline to message."""
