"""Data in and out: Kaggle, buckets, the web; nothing twice, nothing overwritten."""
