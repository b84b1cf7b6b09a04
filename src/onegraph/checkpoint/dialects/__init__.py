"""How other programs name the tensors of an adapter: tables that rename, and the configuration that goes with them."""
