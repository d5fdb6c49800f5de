"""DualPace: LLM serving on one node with two engines that keep their own pace."""
