"""Callbacks of `DAPPrTrainer`, installed by `DAPPrConfig.install_callbacks`."""
