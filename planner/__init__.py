"""Which workers serve a request: prefix index, load, cost and choice, all sans-IO."""
