"""`rushes loader`: makes jobs of the lines of campaigns, closes them when campaigns are stopped, and writes results."""
