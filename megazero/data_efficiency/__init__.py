"""data_efficiency: how difficult samples are (the analyzer and its files), and what to train on when."""
