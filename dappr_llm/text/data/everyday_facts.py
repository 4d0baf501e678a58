"""
Fact tables of the bundled `everyday` task and its OOD tasks.

Plain data; [`dappr_llm.text.data.everyday`] generates items from it.
"""

# Keys are noun phrases as used in questions. A word is in one category only; words with a second everyday meaning are
# left out (orange, turkey, bow, bat, olive, organ, crane) or listed in `ALSO`.
CATEGORIES: dict[str, tuple[str, ...]] = {
    noun: tuple(words.split())
    for noun, words in {
        "fruit": """apple banana pear grape lemon lime mango cherry plum strawberry raspberry blueberry pineapple
            melon watermelon apricot papaya blackberry cranberry coconut pomegranate nectarine tangerine guava
            gooseberry fig peach quince lychee kiwi""",
        "vegetable": """carrot potato onion cabbage broccoli spinach lettuce cauliflower celery leek turnip radish
            beetroot parsnip asparagus kale garlic zucchini eggplant artichoke pumpkin cucumber pea bean sweetcorn
            okra yam chard shallot fennel""",
        "tree": """oak pine maple birch willow elm cedar fir beech poplar spruce palm cypress sycamore redwood
            eucalyptus yew larch hawthorn alder rowan chestnut hazel walnut mahogany teak acacia sequoia linden
            holly""",
        "flower": """rose tulip daisy lily daffodil orchid carnation iris poppy marigold lavender peony dandelion
            violet hyacinth crocus pansy petunia snowdrop buttercup geranium begonia primrose dahlia jasmine lilac
            hydrangea foxglove bluebell azalea""",
        "animal": """dog cat horse cow pig sheep goat lion tiger bear elephant monkey rabbit mouse wolf fox deer
            giraffe zebra donkey kangaroo hippo squirrel leopard gorilla panda otter hedgehog koala hamster""",
        "bird": """robin sparrow eagle owl crow pigeon duck goose swan penguin parrot ostrich flamingo seagull hawk
            falcon peacock pheasant raven magpie woodpecker stork pelican heron vulture cuckoo dove nightingale
            albatross finch""",
        "fish": """trout cod tuna salmon haddock herring mackerel sardine carp eel halibut anchovy sturgeon plaice
            flounder shark piranha tilapia barracuda minnow mullet snapper turbot grouper marlin pollock stingray
            pilchard guppy hake""",
        "insect": """ant bee wasp fly mosquito butterfly moth beetle ladybug grasshopper cricket dragonfly cockroach
            termite flea louse hornet bumblebee locust mantis aphid midge gnat earwig cicada firefly weevil bedbug
            caterpillar mayfly""",
        "tool": """hammer saw drill wrench screwdriver pliers shovel axe chisel spade rake spanner hoe crowbar mallet
            chainsaw clamp pickaxe hatchet trowel hacksaw sledgehammer scissors tweezers paintbrush jigsaw sickle
            scythe pitchfork shears""",
        "kitchen item": """spoon fork knife plate bowl cup pan pot kettle toaster oven fridge freezer whisk ladle
            spatula saucepan teapot mug colander sieve grater blender corkscrew teaspoon saucer jug microwave peeler
            wok""",
        "musical instrument": """violin piano guitar drum flute trumpet cello harp clarinet saxophone trombone banjo
            tuba oboe accordion xylophone harmonica bagpipes ukulele mandolin bassoon cymbal tambourine fiddle lute
            lyre piccolo sitar harpsichord castanets""",
        "piece of clothing": """shirt trousers sock hat coat jacket dress skirt scarf glove sweater jeans shorts
            blouse vest hoodie pyjamas cardigan jumper tights raincoat swimsuit bikini mitten kilt tunic waistcoat
            leggings overcoat sweatshirt""",
        "piece of furniture": """table chair sofa bed desk wardrobe bookcase stool bench couch armchair cupboard
            dresser shelf cabinet sideboard crib cot mattress footstool recliner hammock futon bookshelf highchair
            cradle settee nightstand bunk loveseat""",
        "vehicle": """car bus train bicycle truck lorry van tram boat ship plane helicopter motorcycle taxi tractor
            scooter ambulance ferry canoe yacht submarine sledge wagon jeep limousine tricycle minibus caravan
            hovercraft moped""",
        "colour": """red blue green yellow black white brown pink purple grey turquoise crimson scarlet beige magenta
            cyan maroon navy indigo tan khaki azure mauve ochre vermilion taupe auburn ultramarine teal
            aquamarine""",
        "part of the body": """arm leg head hand foot nose ear eye mouth knee elbow shoulder finger toe neck stomach
            heart lung liver kidney brain tongue tooth chin cheek forehead ankle wrist thumb throat""",
        "drink": """tea coffee milk water juice beer wine cider lemonade cocoa soda whisky rum vodka gin brandy
            champagne cola milkshake smoothie espresso cappuccino latte tequila ale lager sherry cognac cocktail
            martini""",
        "sport": """football tennis hockey rugby golf judo karate volleyball basketball baseball badminton rowing
            sailing skiing cycling wrestling gymnastics archery handball softball swimming boxing diving fencing
            skating snowboarding surfing lacrosse bowling weightlifting""",
        "country": """France Germany Spain Italy Russia Japan Canada Brazil India Egypt Poland Sweden Norway Greece
            Kenya Peru Cuba Portugal Ireland Belgium Austria Denmark Finland Argentina Vietnam Thailand Morocco
            Nigeria Iceland Nepal""",
        "city": """London Paris Berlin Madrid Rome Tokyo Moscow Chicago Boston Dublin Lisbon Vienna Prague Athens
            Cairo Toronto Sydney Amsterdam Barcelona Munich Seattle Oslo Beijing Shanghai Delhi Seoul Warsaw Budapest
            Stockholm Venice""",
        "language": """French German Spanish English Italian Russian Chinese Japanese Arabic Portuguese Dutch Greek
            Latin Hindi Turkish Polish Swedish Korean Hebrew Danish Finnish Norwegian Czech Hungarian Welsh Thai
            Vietnamese Swahili Urdu Bengali""",
        "metal": """iron copper gold silver tin lead zinc nickel steel brass bronze aluminium titanium platinum
            mercury cobalt chromium tungsten lithium sodium magnesium uranium calcium potassium manganese palladium
            cadmium barium radium plutonium""",
        "job": """teacher nurse doctor lawyer farmer baker plumber carpenter judge pilot sailor butcher barber tailor
            dentist waiter chef engineer soldier librarian journalist electrician mechanic accountant cashier
            secretary architect surgeon gardener miner""",
        "kind of weather": """rain snow fog hail wind storm thunder lightning sleet mist drizzle frost sunshine
            blizzard hurricane tornado cyclone breeze gale typhoon downpour haze heatwave monsoon squall thunderstorm
            snowstorm flurry drought gust""",
        "building": """house school church hospital castle hotel library museum palace barn factory theatre cinema
            stadium prison mosque cathedral garage cottage warehouse skyscraper supermarket tower chapel monastery
            cabin mansion courthouse bungalow lighthouse""",
        "feeling": """joy anger fear sadness affection hatred shame guilt pride envy jealousy grief happiness disgust
            surprise hope excitement boredom loneliness gratitude anxiety delight rage sorrow despair embarrassment
            worry regret relief contempt""",
    }.items()
}

# Categories of one group are never distractors for each other: a robin is also an animal, a cherry also a tree, a
# knife also a tool, gold also a colour.
CONFUSABLE: tuple[tuple[str, ...], ...] = (
    ("animal", "bird", "fish", "insect"),
    ("fruit", "vegetable", "tree", "flower"),
    ("kitchen item", "fruit", "vegetable", "drink"),
    ("tool", "kitchen item", "piece of furniture"),
    ("tool", "vehicle"),
    ("colour", "fruit"),
    ("colour", "vegetable"),
    ("colour", "tree"),
    ("colour", "flower"),
    ("colour", "bird"),
    ("colour", "metal"),
    ("colour", "drink"),
)

# Single words that also belong to another category, where excluding the whole category would exclude too much.
ALSO: dict[str, tuple[str, ...]] = {
    "beetle": ("vehicle",),
    "blue": ("feeling",),
    "brass": ("musical instrument",),
    "butterfly": ("sport",),
    "caterpillar": ("vehicle",),
    "cricket": ("sport",),
    "flute": ("kitchen item",),
    "hurricane": ("drink",),
    "iris": ("part of the body",),
    "iron": ("tool", "kitchen item"),
    "khaki": ("piece of clothing",),
    "kiwi": ("bird",),
    "palm": ("part of the body",),
    "rose": ("drink",),
    "salmon": ("colour",),
    "screwdriver": ("drink",),
    "silver": ("kitchen item",),
    "steel": ("kitchen item", "tool"),
    "tin": ("kitchen item",),
    "tongue": ("language",),
}

_PAIRS = """
hot cold, big small, tall short, fast slow, happy sad, young old, day night, up down, left right,
open closed, full empty, heavy light, bright dark, hard soft, easy difficult, simple complex, wet dry,
clean dirty, rich poor, strong weak, early late, high low, near far, thick thin, wide narrow, deep shallow,
loud quiet, rough smooth, sharp blunt, sweet sour, good bad, true false, begin end, win lose, buy sell,
give take, push pull, love hate, laugh cry, arrive depart, remember forget, accept refuse, allow forbid,
increase decrease, ask answer, float sink, attack defend, build destroy, borrow lend, rise fall,
success failure, friend enemy, war peace, life death, top bottom, inside outside, above below, before after,
always never, everything nothing, more less, first last, same different, summer winter, north south,
east west, morning evening, male female, entrance exit, brave cowardly, cheap expensive, safe dangerous,
polite rude, kind cruel, lazy hardworking, generous selfish, asleep awake, alive dead, ancient modern,
public private, fresh stale, tight loose, straight crooked, raw cooked, guilty innocent, front back,
hero villain, present absent, maximum minimum, victory defeat, proud ashamed, urban rural, wild tame,
temporary permanent, natural artificial, smile frown, optimist pessimist, profit loss, sunrise sunset,
heaven hell, floor ceiling, freeze melt, praise blame
"""

_GROUPS = """
big tall wide thick deep high heavy more maximum
small short thin narrow shallow low light less minimum
up rise above top high increase more maximum north ceiling float success profit victory sunrise heaven
down fall below bottom low decrease less minimum south floor sink failure loss defeat sunset hell
begin first before early open arrive entrance morning sunrise build life front
end last after late closed depart exit evening sunset destroy death back
day morning sunrise bright light
night evening sunset dark heavy
hot summer melt cooked
cold winter freeze
early fast young modern fresh raw
late slow old ancient stale cooked
win success victory profit
lose failure defeat loss fall
give sell lend
take buy borrow accept
accept allow
refuse forbid
good kind polite generous brave hero innocent proud happy hardworking friend clean heaven rich strong sweet
good safe fresh true love peace praise win success victory smile laugh optimist defend bright natural right
happy smile laugh love proud optimist heaven praise
kind polite generous friend love peace praise defend sweet safe tame
innocent true straight clean
bad cruel rude selfish cowardly villain guilty ashamed sad lazy enemy dirty hell poor weak sour
bad dangerous stale false hate war blame lose failure defeat frown cry pessimist attack dark artificial left
sad frown cry hate ashamed pessimist hell blame
cruel rude selfish enemy hate war blame attack sour dangerous wild villain
guilty false crooked dirty
soft easy simple light smooth weak loose quiet blunt
hard difficult complex heavy rough strong tight loud sharp
rough sharp crooked hard
straight smooth true
sharp polite
blunt rude
quiet peace low soft
loud high hard
right true
left false
right east
left west
natural true raw wild rural
false artificial urban cooked tame
urban modern
wild dangerous
tame safe quiet
rich expensive strong generous
poor cheap weak selfish
brave strong
cowardly weak
build defend
destroy attack
alive life awake
dead death asleep
present near inside
absent far outside ancient
absent before
absent after
up happy
down sad
always everything more full maximum permanent
never nothing less empty minimum temporary short
open public outside loose
closed private inside tight
tight fast
deep complex
shallow simple light high
low deep
wet sweet fresh
always permanent same
temporary different
young alive
old dead
"""

# Each word is in one pair only, so that its opposite is unique within the table.
ANTONYMS: tuple[tuple[str, str], ...] = tuple((pair.split()[0], pair.split()[1]) for pair in _PAIRS.split(","))

# Words of one group could answer the same question, so they are never answer and distractor of one item: synonyms
# (tall, high) and second opposites of an ambiguous word (hard: soft, easy).
RELATED: tuple[tuple[str, ...], ...] = tuple(tuple(group.split()) for group in _GROUPS.strip().split("\n"))
