"""Generated protobuf and gRPC stubs; `make proto` writes them from protos/."""
