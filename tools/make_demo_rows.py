"""Writes the rows of `finefit demo`: short messages to a small shop, each with the order it contains as strict JSON.

Every message is drawn from a skeleton written by hand. The splits share no skeleton, and most names and items of the
validation and test rows never occur in training. Each row has its own seed: rewording a skeleton changes little else.

    python tools/make_demo_rows.py src/finefit/recipes/demo
"""

import json
import random
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

SYSTEM = "Extract orders."
# The keys and their types stand in the user's turn: SmolLM2-135M attempts JSON there, and ignored a similar line as a
# system prompt.
REQUEST = "JSON with customer, item (singular), quantity, day (or null), urgent (bool):"


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """What the rows of one file are drawn from; every fourth row uses names and items of training instead of its
    own."""

    name: str
    rows_per_skeleton: int
    skeletons: tuple[str, ...]
    first_names: tuple[str, ...]
    last_names: tuple[str, ...]
    items: tuple[str, ...]


def lines(text: str) -> tuple[str, ...]:
    return tuple(line.strip() for line in text.strip().splitlines())


def listed(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(","))


# Slots of a skeleton:
#   {me}       the customer                      {friend}    somebody else
#   {want}     count and item, "three desk lamps", "a kettle"
#   {n}        the count alone, two or more      {wrong}     a number that is not the count
# {things}   the item in the plural            {thing}     the item in the singular (one of it, unless {n} stands there
# too)
#   {other}    another item, in the plural       {otherone}  another item, in the singular
#   {day}      the weekday wanted                {otherday}  another weekday
#   {anyday}   says that the day does not matter; every skeleton has this or {day}
#   {ref}      a house or order number           {price}     a sum of money
#   {time}     a time of day
#   {hurry}    makes the order urgent            {calm}      says that it is not
#   {pace}     either of the two; it opens a skeleton that has none of the three
TRAIN_SKELETONS = lines("""
    Hi, {me} here. Could you put aside {want} for me? I'll come by on {day}. {pace}
    Hello! I'd like {want}, delivered {day} to {ref} Oak Road if possible. {pace} Thanks, {me}
    Hey, it's {me}. Do you still have {other}? If not, never mind, I only really need {want}. {anyday}
    Good morning, my order is {want}. Flat {ref}, ring twice. {anyday} {pace} Regards, {me}
    {hurry} {want} please, to {ref} Mill Road, on {day}. {me}
    This is {me}. My {thing} broke last {otherday} so I need a new one by {day}. {pace}
    Please cancel the {other} and send {want} on {day} instead. {pace} {me}
    {friend} says you sell good {things}. Could I have {n}? Name is {me}, I'm free on {day}.
    I ordered {wrong} {things}, make that {n} please. {me}, order {ref}. {anyday} {pace}
    {me} again :) {want} this time, {day} works best for me. {pace}
    So lovely to meet you yesterday! As discussed, {want} please. {anyday} {pace} Love, {me}
    Need {want} for {day}. {hurry} {me}
    Can somebody bring {want} round to number {ref}? {day} would be great. Cheers, {me}
    Hi there, {me} speaking, I was in the shop last week. I'll take {want} after all. {anyday} {pace}
    Not {otherday} but {day} please, for my {n} {things}. Sorry for the mess! {me}
    The {otherone} I got was perfect, so now I want {want} too. {anyday} {calm} Best, {me}
    How much for {n} {things}? Up to {price} is ok, just send them by {day}. {me}
    {want}, {day}, name of {me}. {pace}
    Dear team, kindly reserve {want} under {me}. I can collect on {day}. {pace}
    My dog ate the {otherone}, haha. Anyway, {want} please. {anyday} {hurry} {me}
    hi its {me}, can i get {want} pls, {day} latest, thx
    We talked about {wrong} {things} but {n} will be better. {day} please. {pace} Yours, {me}
    Is it true that {other} are sold out? Shame. Then just {want} for {me}, {day} please.
    {me} from number {ref} here, {want} for {day} as usual please.
    I'm {me}, {friend}'s neighbour. Could you get me {want}? {anyday} {pace}
    {hurry} My {thing} just broke and I need another. {me}, {ref} Park Lane {anyday}
    For {day}: {want}. For {otherday}: nothing, we're closed. {me}
    Thank you for the {other}! Next I would love {want}, say on {day}. {pace} {me}
    Morning! {n} {things} please, not {wrong} like last time. {anyday} {me}
    Would you keep {want} behind the counter until {day}? It's for {me}. {calm}
    No {other} this week, only {want}. Pick up {day}. Kind regards, {me}
    {me} would like {want}, budget {price}. {anyday} {pace}
    Hello, I paid {price} already. Please ship the {n} {things} to {me} by {day}. {hurry}
    Could I swap my {otherone} for {want} on {day}? {pace} Thanks so much, {me}
    Tell {friend} hi from me! And please pack {want} for {day}. Hugs, {me}
    {want} in blue if possible. I'm {me}, call me on extension {ref}. {anyday} {pace}
    I said {otherday}, but {day} is better. Still {want}. Greetings from {me}
    Hey, a short one: {n} {things} for {me}, by {day}. {hurry}
    Hi! We are {wrong} people at the party so I'd better get {want}. {day} please! {me}
    Forget what {friend} told you, I want {want}. {anyday} {pace} Signed, {me}
    A question from {me}: can you deliver {want} on {day}? I'm out all {otherday}.
    Sorry to bother you again, {me} here. {want} on {day}, please. {calm}
    Just moved to {ref} Elm Street and have no {thing}! Please bring me one on {day}. {me}
    One {otherone} came broken, keep it. Send me {want} by {day}. {hurry} {me}
    {me} writing. {wrong} {things}... no wait, {n}. {day} please. {pace}
    Do you open on {day}? I'd come for {want} then. {me}
    My colleague {friend} forgot to order {want}, so here I am. {anyday} {pace} {me}
    Put me down for {want}, {me}, and I'll come in on {day} after work.
    It's about order {ref}: add {want}, drop the {other}. {day} is fine. {me}
    Ciao, {me} here! {want} please, and make it {day}. {hurry}
    Hope business is good. I need {want} for the office. {anyday} {pace} Best wishes, {me}
    To whom it may concern: {me} requests {want}, to arrive on {day}.
    I can't find any {things} in town!! Please save {n} for {me}. {anyday} {pace}
    Hello, {friend} gave me your number. I want to buy {want}, for {day}. My name is {me}.
    {calm} But {want} for {me} please, maybe on {day}.
    Your {other} are too expensive at {price}. I'll just have {want}. {anyday} {me}
    {day} is my birthday and all I want is {want}, lol. {pace} {me}
    Please change {otherday} to {day} for my order of {want}. Thanks! {me}
    {n} of the {things} from your window please, for {me}, {day} if you can. {pace}
    Got {price} left on my gift card, so {want} it is. {anyday} {me} x
    Hi, {wrong} {things} were on my list, but it has to be {n}. Would that be ready by {day}? {hurry} Thanks, {me}
    {me}, account {ref}: {want}, collecting {day}. {pace}
    Yes to the {things}, no to the {other}. {n} please, for {day}. {pace} {me}
    Please send {want} to my office, not to my home. {day} is fine. {hurry} {me}
    I counted again and I need {n} {things}, not {wrong}. {day} is still ok. {me}
    Hiya! Mum loved the {otherone}. Now she needs {want}. {anyday} {pace} Bye, {me}
    We close at {time} so please deliver the {n} {things} early on {day}. {me}
    Bus {ref} was late and I missed you, sorry. I wanted {want}. {me}, back on {day}.
    Name: {me}. Order: {want}. Day: {day}. {pace}
    Good evening, would it be possible to get {want}? {friend} and I are repainting. {anyday} {pace} Sincerely, {me}
    Oh no, we ran out of {things}! {n} more by {day} please. {hurry} {me}
    Any chance of {want} by {day}? Asking for myself, {me}.
    {me} here, let's do {n} {things} rather than {wrong}. {calm} See you {day}.
    After {wrong} years my {thing} gave up. One more for {day}, please. {me}
    I was first in line this morning and still got no {thing}. Please hold one for {me}. {anyday} {pace}
    Please add my name, {me}, to the list for {want}. {anyday} {pace}
    Hello from {me}! The kids broke our {thing}, can I have a new one? {anyday} {pace}
    {friend} will come round for me on {day}: {want}, for {me}.
    Still waiting for my {n} {things}!! {anyday} {hurry} {me}, order {ref}
    Ok then, {want} at {price} each. See you {day}, {me}
    I don't need the {other} anymore. What I do need on {day}: {want}. {pace} {me}
    This time {n} {things}, last time it was {wrong}. {day} please. Thanks a lot, {me}
    What a storm! Our {thing} is gone. Can you bring another on {day}? {pace} {me}
    Hey hey, {me} needs {want}. Is {day} ok for you? {otherday} is too late.
    Delivery to gate {ref} please: {want}. {anyday} {hurry} Ask for {me}.
    Thinking about {other}... no. {want}, final answer! {day} please. {me}
    Invoice to {friend}, goods to me: {want}. I am {me}. {anyday} {pace}
    Hello, {want} for the school please. {otherday} is a holiday, so come on {day}. Thank you, {me}
    {me} here. Can't decide between {wrong} and {n} {things}... ok, {n}. {anyday} {pace}
    Please send {want}, {day} or later. {calm} Warmly, {me}
    Don't come {otherday}, nobody is home. Bring {want} on {day}. {me}
    Bill me {price} and send over {want} on {day}. {hurry} {me}
    I would be grateful for {want}. You know where I live, {ref} Hill View. {anyday} {pace} {me}
    A friend of {friend} here, name's {me}. {want} for {day} please!
    Your ad says {price} for {other}, but I want {want}. {anyday} {me}
    The form says {wrong} {things}, but {n} is right. For {me}, and {day} is the day.
    We are out of {things}. Please send {n}. {anyday} {hurry} {me}
    {me} here, could I have {want} sent to number {ref} on {day}? {hurry}
    Please keep {want} for me, {me}. I can't make {otherday}, so {day}.
    Your driver left {wrong} {things} with {friend}, but I wanted {n}, on {day}. {hurry} {me}
    I'd love {want} for {day}. {hurry} My name is {me}, by the way.
    Thanks for calling back! Yes, {want}, and yes, {day} is good. {me}
    {hurry} The {otherone} can wait, but I must have {want} on {day}. {me}
    It's {me}. I have {wrong} {other} already, what I'm missing is {want}. {anyday} {pace}
    Hello, is this the shop? {me} would like {n} {things} by {day}. {calm}
    Half of the {other} were broken! Please bring {want} on {day}. {hurry} {me}
    See you {day}! I'll pick up {want} then, order {ref}. {me}
    Until {otherday} I'm away, from {day} I'm back, and then I'd like {want}. {me}
    {want} to {ref} Lake Street please, {me}. {anyday} {hurry}
    {me} to the shop: {want}, {day}, and please no {other}.
    Could you check if {want} can be here by {day}? {calm} {me}
    Make it {n} {things} in the end, {friend} wants some too. {day} please. {me}
    Before I forget: {want}! {anyday} {pace} Have a nice day, {me}
    Our shelf {ref} is empty, we need {n} {things}. {anyday} {hurry} Greetings, {me}
    The {things} were a hit. Can you do {n} more for {day}? {me}
    I'm not {friend}, I'm {me}, and I ordered {want}, not {other}. {anyday} {hurry}
    Please call me at {time} about my {n} {things}. {anyday} {pace} {me}
    {me} here: {day} delivery of {want} please, door code {ref}.
    We open at {time} on {day} and would like {want} by then. {hurry} {me}
    Many thanks for {otherday}. For {day} we'd like {want}. {calm} {me}
    {friend} and I share the flat, but this order is mine, {me}: {want} on {day}. {pace}
    Box {ref} is mine, I'm {me}. Please put {want} in there on {day}. {pace}
    {me}, table {ref}. We'd like {want}. {anyday} {pace}
    Hello {friend}, this is {me}. Please send {want} on {day}. {pace}
    Hi {friend}! {want} please. {anyday} {pace} Yours, {me}
    We got {wrong} {other} by mistake. What we want is {want}, on {day}. {pace} {me}
    I paid for {n} {things}, yet {wrong} came. Please fix that by {day}. {pace} {me}
    Order {ref} should read {n} {things}, not {wrong}. {anyday} {pace} {me}
    Not for {friend} but for {me}: {want}. {anyday} {pace}
    At {time} on {day} I'll be at the door for {want}. {pace} {me}
    You have {n} {things} left? I'll take all {n}, on {day}. {pace} {me}
    Is {friend} still with you? Anyway, {me} needs {want} by {day}. {pace}
    The last {otherone} lasted {wrong} years! Now {want} for {day}, please. {pace} {me}
    Please ring bell {ref} and hand over {want} on {day}. {pace} {me}
    Cheers for the {other}. {want} next, please. {anyday} {pace} {me}
    {day}, not {otherday}: that is when {me} needs {want}. {pace}
    """)

VALIDATION_SKELETONS = lines("""
    Hi, {want} please. I'm home all {day}. {pace} {me}
    {me} at desk {ref} would like {want}. {anyday} {pace}
    Leave out the {other} this time, I just want {want} on {day}. Thanks, {me}
    You sent {wrong} {things}, I had asked for {n}. {anyday} {pace} {me}
    Can you help? I need {want}. {anyday} {hurry} My name is {me}.
    Hello, {friend} here wrote down the wrong day: {day}, not {otherday}. It's {want} for {me}.
    {price} sounds fair. {want} then, please. {anyday} {calm} {me}
    Our {thing} got lost, so one new one by {day} please. {me}
    Great shop! Please book {want} in for {me}. {anyday} {pace}
    {hurry} We need {n} {things} at the club. {me}, phone {ref} {anyday}
    I'll be passing by on {day} to collect {want}. Cheers, {me}
    Instead of {wrong} please bring {n} {things} on {day}. {pace} {me}
    """)

TEST_SKELETONS = lines("""
    Hey, are you open late? I want to grab {want} on {day}. {me}
    {me} here, third try! {want} on {day} please. {hurry}
    Scrap the {other}. We'll have {want} and that's it. {anyday} {pace} Ta, {me}
    Good afternoon, please deliver {want} to room {ref}. {day} suits us. {me}
    I told {friend} {wrong}, but we really need {n} {things}. {anyday} {pace} {me}
    Our old {thing} is broken, so I'd like a replacement on {day}. Thanks, {me}
    May I order {want}? {anyday} {calm} Yours truly, {me}
    The name is {me} and I'm after {want}. {otherday} is no good, {day} is.
    Saw the {other} online, not for me. But {want}, yes please! {anyday} {pace} {me}
    hello, {me} here, {want} for the garden party pls, we start at {time} on {day}
    {want} please, and quick! {anyday} {hurry} It's {me} from the bakery.
    I've got {price} in cash, so please wrap up {want} for {day}. {me}
    Please note for {day}: {n} {things}, customer {me}. {pace}
    {friend} took my last {thing}. Could you send me one more by {day}? {hurry} {me}
    Just checking that my {n} {things} will be here on {day}. Order {ref}, {me}.
    Hmm, {wrong} {things} is not right. Let's say {n}. {anyday} {calm} {me}
    Last week you were closed, so I'm writing instead: {want} for {day} please. {me}
    Wow, what a nice {otherone} in the window! Still, I only need {want}, for {day}. {me}
    Dear all, this is {me}. We require {want} by {day}. {hurry}
    Train leaves at {time}, so short: {want}, {day}, {me}. Bye!
    Please don't send {other} again. I want {want} on {day}. {pace} Thanks, {me}
    My neighbour {friend} has {want}, and I want the same. {day} please. {me}
    How are you? I'd be happy with {want}. {anyday} {pace} All the best, {me}
    {day} at noon I'll pick up {want}. See you then, {me}
    Only {n} {things} this time, the other {wrong} can stay with you. {anyday} {me}
    {me}, unit {ref}. {want} needed for {day}. {pace}
    Would {day} be ok for {want}? My cousin {friend} is away until {otherday}. Best, {me}
    I'm so sorry, I meant {n} {things} and not {wrong}! {day}, please. {hurry} {me}
    You know me, {me}, always late. {want} by {day} please.
    We painted the kitchen, so now a new {thing} is due. {anyday} {calm} Cheers, {me}
    Can I still change my order? No more {other}, but {want}. {day} please. {me}
    If {price} is right, I'll take {n} {things}. {anyday} {pace} Regards, {me}
    It rained in and our {things} are ruined. {n} new ones please. {anyday} {hurry} {me}
    Moving house on {otherday}! So bring {want} on {day}, to number {ref}. {me}
    {friend} and {me} here, well, mostly {me}. {want} please. {anyday} {pace}
    Please post {want} to me, {me}, {ref} Station Road. {anyday} {pace}
    First {wrong}, then none, now {n}: yes, {n} {things} please, for {day}. {me}
    Loved your talk! Could the shop spare {want} by {day}? {calm} {me}
    Yo, {me}. {want}. {day}. Thanks!
    I owe you {price}, I know. Can I get {want} on {day} all the same? {hurry} {me}
    """)

TRAIN_FIRST_NAMES = listed(
    "Marta, Oliver, Priya, Jonas, Aisha, Tom, Elena, Samuel, Ingrid, Kofi, Lucy, Mateo, Hana, Peter, Nadia, "
    "Victor, Chloe, Omar,"
    "Grace, Stefan, Yuki, Daniel, Rosa, Ahmed, Emma, Lars, Sofia, Ben, Carla, Ivan, Mei, George, Fatima, Hugo, "
    "Anna, Dmitri,"
    "Sarah, Luis, Zoe, Karim, Helen, Marco, Lena, Patrick, Amina, Felix, Julia, Ravi, Nora, Simon, Bianca, "
    "Walter, Leila, Oscar,"
    "Teresa, Erik, Diana, Paul, Miriam, Anton, Claire, Jamal, Vera, Henry, Lucia, Bruno, Kate, Arjun, Monika, Tim,"
    "Abigail, Bogdan, Camille, Dominic, Elsa, Francesca, Gloria, Hassan, Imogen, Jorge, Katarina, Liam, "
    "Mohammed, Natasha, Orla,"
    "Pablo, Rebecca, Sanjay, Tamara, Uma, Valentina, William, Xenia, Yolanda, Zara, Albert, Bridget, Callum, "
    "Dalia, Edgar, Flora,"
    "Giulia, Howard, Iris, Jacob, Kirsten, Louis, Margaret, Nathan, Olga, Pedro, Ruth, Sven, Theo, Viktoria, "
    "Wendy, Youssef, Zelda"
)
TRAIN_LAST_NAMES = listed(
    "Novak, Green, Okafor, Larsen, Rossi, Patel, Weber, Silva, Brown, Tanaka, Moreau, Haddad, Kowalski, "
    "Murphy, Jensen, Costa,"
    "Fischer, Wright, Ali, Popov, Garcia, Lindgren, Chen, Baker, Dubois, Mensah, Hall, Keller, Santos, Young,"
    "Andersson, Bauer, Carter, Davies, Eriksen, Farrell, Gomez, Horvat, Ivanov, Johnson, Kaya, Lambert, "
    "Marino, Nielsen, Osman, Price,"
    "Quinn, Reyes, Schmidt, Thompson, Vargas, Walker, Yilmaz, Zimmer"
)
TRAIN_ITEMS = listed(
    "desk lamp, kettle, garden chair, paint roller, door handle, pillow, notebook, bike light, coffee mug, "
    "curtain rod, hammer,"
    "phone charger, candle, picture frame, water filter, towel, umbrella, wall clock, tea pot, extension cord, "
    "plant pot, broom,"
    "garden hose, mouse trap, smoke alarm, rubber duck, oven glove, table cloth, step ladder, lunch box, "
    "padlock, wine glass,"
    "shower curtain, office chair, light bulb, cutting board, bucket, mirror, bread knife, doormat, blanket, "
    "stapler, soup bowl,"
    "key ring, tent, fan, radiator valve, flower vase, laundry basket, bar stool, frying pan, bath mat, wooden "
    "spoon, bird house,"
    "tool box, work glove, paint brush, egg timer, coat hook, snow shovel, baking tray, sleeping bag, rain "
    "coat, soap dish,"
    "air pump, alarm clock, apron, ash tray, bedside table, bin liner, book shelf, bottle opener, cable tie, "
    "cake tin, camera strap,"
    "cheese grater, clothes line, coffee grinder, compass, cool box, cushion, dinner plate, drain cover, "
    "duvet, ear plug, fly swatter,"
    "fountain pen, fuse, garlic press, guitar string, hand mixer, hinge, ink cartridge, jewel case, juice "
    "press, jump rope, keyboard,"
    "kite, lantern, luggage tag, magnet, measuring cup, mop, napkin, needle, nut cracker, oil can, paper bin, "
    "pencil case, pet bowl,"
    "plunger, potato peeler, quilt, ruler, salt shaker, sander, saw, screwdriver, sieve, sponge, stool, tennis "
    "racket, thermometer,"
    "torch, vacuum bag, wallet, watering can, whistle, wind chime, window blind, zipper"
)
HURRIED = lines("""
    It's urgent.
    I need it asap.
    Please hurry!
    I'm in a big hurry.
    As fast as you can please!
    This is urgent!!
    Quickly please!
    We need this asap.
    Please be quick!
    Urgent!
    It has to be fast.
    Sorry, it's really urgent.
    """)
CALM = lines("""
    No rush.
    There's no rush.
    No rush at all.
    Take your time, no rush.
    There is really no rush.
    """)
ANY_DAY = lines("""
    Any day is fine.
    Any day will do.
    Any day works for me.
    Any day is good.
    """)

TRAIN = Split(
    name="train",
    rows_per_skeleton=2,
    skeletons=TRAIN_SKELETONS,
    first_names=TRAIN_FIRST_NAMES,
    last_names=TRAIN_LAST_NAMES,
    items=TRAIN_ITEMS,
)
VALIDATION = Split(
    name="validation",
    rows_per_skeleton=2,
    skeletons=VALIDATION_SKELETONS,
    first_names=listed("Astrid, Colin, Farah, Gustav, Isabel, Joel, Kamala, Leon, Magda, Nils, Pia, Rashid"),
    last_names=listed("Ferrari, Olsen, Sharma, Cooper, Lopez, Dvorak"),
    items=listed(
        "rice cooker, jam jar, ironing board, sun hat, tape measure, cork screw, spice rack, desk fan, yoga "
        "mat, dog lead"
    ),
)
TEST = Split(
    name="test",
    rows_per_skeleton=1,
    skeletons=TEST_SKELETONS,
    first_names=listed(
        "Beatrix, Cedric, Dolores, Emeka, Frida, Gordon, Harriet, Ismail, Johanna, Kenji, Lorenzo, Maeve, "
        "Nikolai, Odette,"
        "Philippa, Quentin, Rohan, Svetlana, Tariq, Ursula, Vincent, Wanda, Xavier, Yasmin, Zachary, Agnes, "
        "Boris, Celia,"
        "Derek, Esther, Adrian, Brenda, Claudia, Duncan, Elias, Fiona, Gavin, Heidi, Irene, Jasper"
    ),
    last_names=listed(
        "Abara, Becker, Castillo, Dahl, Ellis, Fontaine, Gupta, Hoffman, Ito, Jovanovic, Kelly, Lindholm, "
        "Morales, Nguyen"
    ),
    items=listed(
        "bean bag, camping stove, dart board, door bell, fire blanket, fish tank, flask, garden gnome, glue "
        "gun, hot water bottle,"
        "ice tray, jigsaw puzzle, kitchen scale, lawn mower, letter box, mixing bowl, night light, pepper "
        "mill, phone stand,"
        "pizza cutter, power drill, rake, salad spinner, sewing kit, shoe rack, tea towel, toaster, tripod, "
        "trolley, waffle iron,"
        "chess set, pen holder, door wedge, fruit bowl, hair dryer, key safe, lamp shade, milk jug, wall hook, "
        "wine rack"
    ),
)
SPLITS = (TRAIN, VALIDATION, TEST)

SEED = "finefit demo"
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
SHORT_DAYS = ("Mon", "Tues", "Wed", "Thurs", "Fri", "Sat", "Sun")
NUMBER_WORDS = listed("one, two, three, four, five, six, seven, eight, nine")
LARGE_COUNTS = (10, 12, 15, 16, 18, 20, 25, 30, 40)


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    customer: str
    item: str
    quantity: int
    day: str | None
    urgent: bool

    def as_json(self) -> str:
        fields = {key: getattr(self, key) for key in ("customer", "item", "quantity", "day", "urgent")}
        return json.dumps(fields, ensure_ascii=False, separators=(",", ":"))


def plural(item: str) -> str:
    """Every plural contains its singular, so that the item of an answer can be found in its message."""
    return item + ("es" if item.endswith(("s", "x", "sh", "ch")) else "s")


def spelled(count: int, rng: random.Random) -> str:
    return NUMBER_WORDS[count - 1] if count <= len(NUMBER_WORDS) and rng.random() < 0.6 else str(count)


def counted(item: str, count: int, rng: random.Random) -> str:
    if count == 1:
        article = "an" if item[0] in "aeiou" else "a"
        return f"{rng.choice((article, article, 'one', '1'))} {item}"
    return f"{spelled(count, rng)} {plural(item)}"


def draw_quantity(skeleton: str, rng: random.Random) -> int:
    if "{thing}" in skeleton and "{n}" not in skeleton:
        return 1
    counts: list[int] = [*range(2, 10), rng.choice(LARGE_COUNTS)]
    if "{n}" not in skeleton:
        counts += [1, 1, 1]
    return rng.choice(counts)


def dealt(pool: Sequence[str], split: Split, position: int) -> str:
    """Deals like a shuffled pack of cards: nothing comes a second time before everything came once."""
    return random.Random(f"{SEED}/{split.name}/{pool[0]}").sample(pool, len(pool))[position % len(pool)]


def draw_pace(skeleton: str, rng: random.Random) -> str:
    if "{hurry}" in skeleton:
        return rng.choice(HURRIED)
    if "{calm}" in skeleton:
        return rng.choice(CALM)
    return rng.choice((rng.choice(HURRIED), rng.choice(CALM)))


def written_day(day: str, rng: random.Random) -> str:
    return SHORT_DAYS[DAYS.index(day)] if rng.random() < 0.15 else day


def roughened(message: str, customer: str, rng: random.Random) -> str:
    """One message in ten is typed without capitals but in the name, one in eight without its last full stop."""
    message = re.sub(r"\s+", " ", message).strip()
    message = re.sub(r"(^|[.!?] )([a-z])", lambda found: found[1] + found[2].upper(), message)
    if rng.random() < 0.1:
        message = message.lower().replace(customer.lower(), customer)
    return message.rstrip(".") if rng.random() < 0.125 else message


def draw(split: Split, skeleton: str, index: int) -> tuple[str, Order]:
    rng = random.Random(f"{SEED}/{split.name}/{skeleton}/{index}")
    position = split.skeletons.index(skeleton) * split.rows_per_skeleton + index
    words = TRAIN if position % 4 == 3 else split
    item, customer = dealt(words.items, split, position), dealt(words.first_names, split, position)
    otherone = rng.choice([other for other in words.items if other != item])
    friend = rng.choice([name for name in words.first_names if name != customer])
    if rng.random() < 0.4:
        customer = f"{customer} {rng.choice(words.last_names)}"
    day, otherday = rng.sample(DAYS, 2)
    quantity = draw_quantity(skeleton, rng)
    wrong = rng.choice([count for count in range(2, 10) if count != quantity])
    pace = draw_pace(skeleton, rng)
    if not {"{pace}", "{hurry}", "{calm}"} & set(re.findall(r"{\w+}", skeleton)):
        skeleton = "{pace} " + skeleton
    message = skeleton.format(
        me=customer,
        friend=friend,
        want=counted(item, quantity, rng),
        n=spelled(quantity, rng),
        wrong=spelled(wrong, rng),
        thing=item,
        things=plural(item),
        otherone=otherone,
        other=plural(otherone),
        day=written_day(day, rng),
        otherday=written_day(otherday, rng),
        ref=rng.randrange(13, 480),
        time=f"{rng.randrange(6, 12)}:{rng.choice((15, 20, 30, 45))}",
        price=f"{rng.choice('£$€')}{rng.randrange(15, 95)}",
        anyday=rng.choice(ANY_DAY),
        hurry=pace,
        calm=pace,
        pace=pace,
    )
    wanted_day = day if "{day}" in skeleton else None
    order = Order(customer=customer, item=item, quantity=quantity, day=wanted_day, urgent=pace in HURRIED)
    return roughened(message, customer, rng), order


def row(message: str, order: Order) -> str:
    turns = (("system", SYSTEM), ("user", f"{REQUEST}\n{message}"), ("assistant", order.as_json()))
    return json.dumps({"messages": [{"role": role, "content": content} for role, content in turns]}, ensure_ascii=False)


def rows(split: Split) -> list[str]:
    """The rows of one split, shuffled: neighbours in the skeleton list would otherwise share a step."""
    drawn = [draw(split, skeleton, index) for skeleton in split.skeletons for index in range(split.rows_per_skeleton)]
    random.Random(f"{SEED}/{split.name}/order").shuffle(drawn)
    return [row(message, order) for message, order in drawn]


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for split in SPLITS:
        text = "".join(f"{line}\n" for line in rows(split))
        (folder / f"{split.name}.jsonl").write_text(text, encoding="utf-8", newline="\n")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python tools/make_demo_rows.py FOLDER")
    main(Path(sys.argv[1]))
