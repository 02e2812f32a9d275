"""Detection of silent corruption: checksums of what one device owns, and repetition of the last step."""
