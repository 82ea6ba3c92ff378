"""Word lists that several generators share. No list holds a word twice."""

from __future__ import annotations


def listed(text: str, separator: str | None = None) -> tuple[str, ...]:
    """The words of a running text, or its parts between separators."""
    return tuple(part.strip() for part in text.split(separator))


BOYS = listed(
    """Tom Ben Max Sam Leo Jack Finn Noah Oscar Henry Paul Peter Hugo Felix Oliver Theo Adam Luke
    David Simon Victor Martin Jacob Daniel Eric George Frank Robert Arthur Walter Ralph Bruno Otto
    Hector Edgar Rufus Milo Jasper Toby Barney Charlie Freddie Harry Billy Andy Nick Tim Dan Joe
    Ned Gus Rex Kai Ivan Omar Ali Raj Ravi Chen Kofi"""
)
GIRLS = listed(
    """Mia Lily Anna Emma Ella Zoe Lucy Ruby Daisy Rosa Nina Clara Alice Julia Sophie Grace Molly
    Holly Poppy Ivy Jane Kate Mary Laura Sarah Helen Diana Nora Olive Hazel Martha Betty Wendy
    Penny Susan Tina Vera Wilma Ida Greta Heidi Maya Leila Amina Priya Yuki Mei Fatima Carmen
    Elena Irene Judy Kitty Lola Matilda Nelly Polly Stella Tilly Una"""
)
NAMES = (*BOYS, *GIRLS)
ANIMALS = listed(
    """fox rabbit bear mouse horse dog cat owl duck frog goat sheep pig cow wolf lion tiger
    monkey turtle squirrel hedgehog badger otter beaver deer donkey camel panda koala kangaroo
    penguin seal whale dolphin crab snail bee ant spider butterfly robin crow parrot swan goose
    hen rooster lizard hamster elephant"""
)
COLORS = listed("red blue green yellow white black brown pink purple golden silver gray orange")
ADJECTIVES = listed(
    """little small young kind clever brave shy lazy happy quiet gentle friendly curious funny
    hungry proud careful cheerful sleepy tiny fluffy silly wise lonely"""
)
PLACES = listed(
    """forest|village|garden|valley|meadow|town|farm|castle|cave|harbor|city|desert|jungle|swamp
    |old mill|green hill|small island|quiet lake|wide river|tall tree|sunny beach|dark wood
    |snowy mountain|big barn|stone tower|wooden house|little cottage|busy market|old bridge
    |deep canyon|apple orchard|rose garden|windy cliff|warm stable|empty church|mossy log
    |school yard|lighthouse|hollow oak|flower field""",
    "|",
)
OBJECTS = listed(
    """key|hat|ball|book|bell|box|cup|drum|coin|kite|lamp|map|ring|rope|shoe|spoon|stone|basket
    |blanket|boat|bottle|button|candle|coat|crown|feather|flag|flute|glove|hammer|ladder|letter
    |mirror|necklace|pencil|pillow|ribbon|scarf|shell|umbrella|wagon|watch|whistle|whisk""",
    "|",
)
FOODS = listed(
    """apples bread cake cheese honey soup berries carrots nuts pears plums cookies corn fish
    pancakes pie rice salad cherries grapes noodles beans mushrooms butter"""
)
HOBBIES = listed(
    """sing|dance|swim|paint|climb trees|read books|fly kites|play chess|bake bread|plant flowers
    |count the stars|tell jokes|collect shells|ride a bicycle|draw maps|play the drum|watch birds
    |build towers|write letters|run races|dig holes|sail boats|skip stones|pick flowers
    |play hide and seek|catch leaves|make soup|look at clouds""",
    "|",
)
CODE_WORDS = listed(
    """apple river stone table house water light music paper money garden window summer winter
    bridge castle forest island market silver golden yellow orange purple circle square letter
    number story picture kitchen bottle basket button candle carpet flower ground hammer jacket
    ladder mirror needle pencil pepper pocket rabbit ribbon rocket saddle school shadow spider
    spring street string sugar supper thunder ticket tiger tower train tree valley village violin
    wagon wheel whistle wolf world yard zebra anchor arrow badge barrel beach bell bird blanket
    boat bone book bowl box brush bucket camel camera card cave chain chair chalk cheese cherry
    clock cloud coat coffee coin corn cotton crown cup desert desk dish doctor dragon drum eagle
    earth engine eye farm feather field finger fire fish flag floor fog fork fox frog fruit gate
    ghost gift glass glove grape grass guitar hand harbor hat heart hill honey horse hotel ice
    iron jungle key king kite knife lake lamp leaf lemon lion lock magic map milk moon mouse
    nest night nose nut ocean oil onion owl paint park pearl piano pilot planet plate poem
    prince queen radio rain rice ring road robot roof rope rose sail salt sand scarf sea ship
    shoe snow soap song soup spoon star storm sun sword tea tent"""
)
"""Values of the tier T1; each is one token with a space before it."""
