from transformer_engine.pytorch.attention import rope

__all__ = ["rope"]
