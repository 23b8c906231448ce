"""Operations on a model as a whole, whatever layers it is made of."""
