"""Operations on whole models: replace, freeze, fuse, adapt, cast and summarise layers."""
