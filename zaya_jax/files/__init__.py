"""Files: durable writes, JSON and folders from untrusted sources, downloads from the Hugging Face hub."""
