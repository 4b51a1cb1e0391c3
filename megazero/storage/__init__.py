"""storage: objects in S3, Google Cloud Storage, Azure or behind HTTPS, where a run would have files."""
