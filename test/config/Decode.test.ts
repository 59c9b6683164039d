// SPDX-License-Identifier: AGPL-3.0-or-later
/** From sections to values: defaults, bounds, and every fault with its place. */
import { assert, describe, it } from "@effect/vitest"
import * as Duration from "effect/Duration"
import * as Result from "effect/Result"
import * as Config from "../../src/config/Config.ts"
import * as Decode from "../../src/config/Decode.ts"
import * as Ini from "../../src/config/Ini.ts"
import * as Option from "../../src/config/Option.ts"

const source = (text: string, more: Partial<Decode.Source> = {}): Decode.Source => ({
  main: "/etc/pepsi/pepsi.conf",
  base: "/etc/pepsi",
  builtIn: false,
  cpus: 2,
  environment: { PEPSI_HOME: "/var/lib/pepsi" },
  warnings: [],
  sections: Ini.assemble(Ini.parse("/etc/pepsi/pepsi.conf", text).items),
  ...more
})

const problems = (text: string): ReadonlyArray<string> =>
  Decode.decisions(source(text)).problems.map(Ini.format)

const warnings = (text: string): ReadonlyArray<string> => Decode.decisions(source(text)).warnings

const chosen = "[pepsi]\nHOSTNAME = mail.example.org\nDOMAINS = example.org\nUSERS = alice\n"

const encrypt = {
  KEY_WAIT: Option.duration({ doc: "", example: "30 s" }),
  NEXT: Option.section({ doc: "" }),
  WHEN: Option.numbered(Option.section({ doc: "" }), 12),
  KEYS: Option.optional(Option.file({ doc: "" })),
  TOKEN: Option.optional({ ...Option.int({ doc: "", min: 1, max: 9 }), secret: true })
}

const decode = (text: string) => {
  const from = source(text)
  return Decode.decode(from.sections.at(-1)!, encrypt, Decode.surroundings(from))
}

describe("Decode.decode", () => {
  it("privacy 4.3 (2): KEY_WAIT = 30sec is refused with file, line and an example", () => {
    const { problems } = decode("[stage-encrypt]\nNEXT = a\nKEY_WAIT = 30sec")
    assert.deepStrictEqual(problems.map(Ini.format), [
      "/etc/pepsi/pepsi.conf:3: [stage-encrypt] KEY_WAIT: '30sec' is not a duration; example '30 s'"
    ])
  })

  it("names the nearest option of the section for an unknown one", () => {
    const { problems } = decode(
      "[stage-encrypt]\nNEXT = a\nKEY_WAIT = 1 s\nKEY_WAITS = 1 s\nWHEN = b\nWHEN_13 = b"
    )
    assert.deepStrictEqual(
      problems.map(({ origin, text }) => `${origin.line} ${text}`),
      [
        "4 [stage-encrypt] KEY_WAITS is no option here; did you mean KEY_WAIT?",
        "5 [stage-encrypt] WHEN is no option here; did you mean WHEN_1?",
        "6 [stage-encrypt] WHEN_13 is no option here; did you mean WHEN_1?"
      ]
    )
  })

  it("tells of a required option at the header of its section, and of all faults together", () => {
    const { problems } = decode("\n[stage-encrypt]\nWHEN_2 = b c\n")
    assert.deepStrictEqual(
      problems.map(({ origin, text }) => `${origin.line} ${text}`),
      [
        "2 [stage-encrypt] KEY_WAIT is missing; example 'KEY_WAIT = 30 s'",
        "2 [stage-encrypt] NEXT is missing; example 'NEXT = local'",
        "3 [stage-encrypt] WHEN_2: 'b c' is not the name of a stage section; example 'local'"
      ]
    )
  })

  it("reads numbered options in the order of their numbers, gaps allowed", () => {
    const { problems, targets, values } = decode(
      "[s]\nNEXT = n\nKEY_WAIT = 1 s\nWHEN_10 = ten\nWHEN_2 = two\nWHEN_1 = one"
    )
    assert.deepStrictEqual(problems, [])
    assert.deepStrictEqual(values.WHEN, ["one", "two", "ten"])
    assert.deepStrictEqual(
      targets.map(({ option, origin, section }) => [option, section, origin.line]),
      [
        ["NEXT", "n", 2],
        ["WHEN_1", "one", 6],
        ["WHEN_2", "two", 5],
        ["WHEN_10", "ten", 4]
      ]
    )
  })

  it("expands file names only, and makes them absolute", () => {
    const text =
      "[PATHS]\nKEYS = $HOME/keys\nHOME = ${PEPSI_HOME:-/none}\n[s]\nNEXT = a\nKEY_WAIT = 1 s\n"
    assert.strictEqual(decode(`${text}KEYS = $KEYS/a`).values.KEYS, "/var/lib/pepsi/keys/a")
    assert.strictEqual(decode(`${text}KEYS = ./a/b`).values.KEYS, "/etc/pepsi/a/b")
    assert.deepStrictEqual(
      decode("[s]\nNEXT = $A\nKEY_WAIT = 1 s").problems.map(({ text }) => text),
      ["[s] NEXT: '$A' is not the name of a stage section; example 'local'"]
    )
  })

  it("tells of a variable nobody set, and leaves it", () => {
    const { values, warnings } = decode("[s]\nNEXT = a\nKEY_WAIT = 1 s\nKEYS = /k/$NOBODY")
    assert.strictEqual(values.KEYS, "/k/$NOBODY")
    assert.deepStrictEqual(warnings, [
      "/etc/pepsi/pepsi.conf:4: [s] KEYS: $NOBODY is not set and stays as it is"
    ])
  })

  it("never shows a secret, not even a wrong one", () => {
    const { diagnostics, problems } = decode("[s]\nNEXT = a\nKEY_WAIT = 1 s\nTOKEN = hunter2")
    assert.notInclude(JSON.stringify({ diagnostics, problems }), "hunter2")
    assert.deepStrictEqual(
      problems.map(({ text }) => text),
      ["[s] TOKEN: the value is not a whole number from 1 to 9; example '1'"]
    )
  })

  it("hides what comes from a file of secrets, whatever its option", () => {
    const from = source("[s]\nNEXT = a\nKEY_WAIT = 1 s\nKEYS = /hunter2")
    const options = from.sections[0]!.options.map((one) => ({
      ...one,
      secret: one.option === "KEYS"
    }))
    const section = { ...from.sections[0]!, options }
    const { diagnostics, values } = Decode.decode(section, encrypt, Decode.surroundings(from))
    assert.strictEqual(values.KEYS, "/hunter2")
    assert.notInclude(JSON.stringify(diagnostics), "hunter2")
  })

  it("R67: a line end that the environment puts into a file name is refused", () => {
    const from = source("[s]\nNEXT = a\nKEY_WAIT = 1 s\nKEYS = $EVIL", {
      environment: { EVIL: "/k\r\nRCPT TO:<eve@example.org>" }
    })
    const { problems } = Decode.decode(from.sections[0]!, encrypt, Decode.surroundings(from))
    assert.deepStrictEqual(
      problems.map(({ text }) => text),
      [
        "[s] KEYS: '$EVIL' is not a file name: it holds a control character; " +
          "example '$PEPSI_HOME/file'"
      ]
    )
  })
})

describe("Decode.decisions", () => {
  it("has the original's defaults where nothing is written", () => {
    const { dispatch, entries, ingress, pepsi, postgres, problems } = Decode.decisions(source(""))
    assert.deepStrictEqual(problems, [])
    assert.deepStrictEqual(pepsi, {
      HOSTNAME: "mail.pepsi.test",
      DOMAINS: ["pepsi.test"],
      USERS: "any",
      DELIMITER: "+",
      MYNETWORKS: ["127.0.0.0/8", "::1"],
      STATE_DIR: "/var/lib/pepsi",
      LOG: "info",
      LOG_FORMAT: "logfmt",
      ALLOW_FUSION: true,
      AUTHSERV_ID: undefined,
      MAX_HOPS: 50,
      RESOLVER: [],
      ENTRIES: []
    })
    assert.deepStrictEqual(postgres, {
      CONFIG: undefined,
      WORKER_SYNCHRONOUS_COMMIT: false
    })
    assert.strictEqual(ingress.CONN_RATE_PER_SECOND, 1)
    assert.strictEqual(ingress.CONN_RATE_BURST, 1)
    assert.strictEqual(ingress.DB_POOL_SIZE, 1)
    assert.strictEqual(ingress.MESSAGE_SIZE_LIMIT, 50 * 1024 ** 2)
    assert.strictEqual(dispatch.DB_POOL_SIZE, 8)
    assert.deepStrictEqual(dispatch.WORKER_IDLE_TIMEOUT, Duration.seconds(5))
    assert.deepStrictEqual(
      entries.map(({ section }) => section),
      ["init"]
    )
  })

  it("every default and every example of every section can be read", () => {
    const sections = [...Object.values(Config.sections), Config.stage(2)]
    for (const [name, option] of sections.flatMap((one) =>
      Object.entries<Option.Option<unknown>>(one)
    )) {
      for (const text of [option.default, option.example]) {
        if (text !== undefined)
          assert.isTrue(Result.isSuccess(option.read(text)), `${name} = ${text}`)
      }
      assert.match(option.doc, /^[A-Z].*\.$/, name)
    }
  })

  it.each(["$myhostname", "localhost", "mail", "h.example..", "192.0.2.1"])(
    "R67: HOSTNAME = %s is refused at start",
    (name) => {
      const [only, ...rest] = problems(`[pepsi]\nHOSTNAME = ${name}`)
      assert.deepStrictEqual(rest, [])
      assert.include(
        only,
        `/etc/pepsi/pepsi.conf:2: [pepsi] HOSTNAME: '${name}' is not a domain name`
      )
    }
  )

  it("R67: a domain that is none is refused by its name", () => {
    assert.deepStrictEqual(problems("[pepsi]\nDOMAINS = example.org exa_mple"), [
      "/etc/pepsi/pepsi.conf:2: [pepsi] DOMAINS: 'example.org exa_mple' is not a list of domain " +
        "names: " +
        "'exa_mple' is not a domain name; example 'pepsi.test'"
    ])
  })

  it.each([
    ["pepsi", "MYNETWORKS", "10.0.0.0/33"],
    ["pepsi", "MYNETWORKS", "10.0.0.256"],
    ["pepsi", "MYNETWORKS", "::g/8"],
    ["pepsi", "RESOLVER", "127.0.0.1:99999"],
    ["pepsi", "USERS", "../etc"],
    ["pepsi", "USERS", ".hidden"],
    ["pepsi", "DELIMITER", "@"],
    ["pepsi", "LOG", "loud"],
    ["pepsi-ingress", "ADDRESS", "localhost"],
    ["pepsi-ingress", "RCPT_MAX", "99"],
    ["pepsi-ingress", "MESSAGE_SIZE_LIMIT", "1K"],
    ["pepsi-postgres", "CONFIG", "mysql:///pepsi"],
    ["pepsi-dispatch", "POLL_INTERVAL", "forever"]
  ])("[%s] %s = %s is refused", (section, option, text) => {
    const found = problems(`[${section}]\n${option} = ${text}`)
    assert.lengthOf(found, 1)
    assert.include(found[0], `/etc/pepsi/pepsi.conf:2: [${section}] ${option}: `)
  })

  it.each([
    ["pepsi", "MYNETWORKS", "10.0.0.0/8 2001:db8::/32 192.0.2.1"],
    ["pepsi", "RESOLVER", "127.0.0.1:5353 ::1 [::1]:53"],
    ["pepsi", "USERS", "alice bob.b _x"],
    ["pepsi", "DELIMITER", ""],
    ["pepsi-ingress", "ADDRESS", "::"],
    ["pepsi-postgres", "CONFIG", "postgres:///pepsi"]
  ])("[%s] %s = %s is right", (section, option, text) => {
    assert.deepStrictEqual(problems(`[${section}]\n${option} = ${text}`), [])
  })

  it("refuses values that are right alone and wrong together", () => {
    assert.deepStrictEqual(
      problems(
        "[pepsi-ingress]\nMESSAGE_SIZE_LIMIT = 90M\nTLS_KEY = /k\nMEMORY_BUDGET = 80M\n" +
          "[pepsi-dispatch]\nBATCH = 512M\nMAX_INFLIGHT = 80M"
      ).map((text) => text.slice("/etc/pepsi/pepsi.conf:".length)),
      [
        "4: [pepsi-ingress] MEMORY_BUDGET is less than MESSAGE_SIZE_LIMIT: the largest message " +
          "allowed " +
          "could never be received",
        "7: [pepsi-dispatch] MAX_INFLIGHT is less than MESSAGE_SIZE_LIMIT: the largest message " +
          "allowed " +
          "would never be handed out",
        "6: [pepsi-dispatch] BATCH is more than MAX_INFLIGHT",
        "3: [pepsi-ingress] TLS_KEY stands alone: TLS_CERT and TLS_KEY are written both or neither"
      ]
    )
  })

  it("warns of an unknown section, but not of one that is for others", () => {
    assert.deepStrictEqual(
      warnings(`${chosen}[pepsi-ingres]\nPORT = 25\n[x-mine]\n[PATHS]\n[stage-a]`),
      [
        "/etc/pepsi/pepsi.conf:5: [pepsi-ingres] is unknown and ignored; " +
          "did you mean pepsi-ingress?"
      ]
    )
  })

  it("warns of values for trials that a file leaves in force", () => {
    assert.deepStrictEqual(warnings("[pepsi]\nHOSTNAME = mail.example.org"), [
      "/etc/pepsi/pepsi.conf:1: [pepsi] DOMAINS, USERS: not written, so a value for trials is used"
    ])
    assert.deepStrictEqual(Decode.decisions(source("", { builtIn: true })).warnings, [])
  })
})

const of = (text: string, more: Partial<Decode.Source> = {}) =>
  Decode.generation(source(text, more))

describe("Decode.generation", () => {
  it("is equal where only places and comments differ", () => {
    assert.strictEqual(
      of("[a]\nX = 1\nY = 2\n[b]\nZ = 3"),
      of("# c\n[b]\nZ=3\n\n[A]\ny = 2\nX = 0\nX = 1")
    )
  })

  it("differs with any value, variable and CPU", () => {
    const all = [
      of("[a]\nX = 1"),
      of("[a]\nX = 2"),
      of("[a]\nY = 1"),
      of("[b]\nX = 1"),
      of("[a]\nX = 1", { environment: {} }),
      of("[a]\nX = 1", { cpus: 3 }),
      of("[a]\nX = 1", { base: "/" })
    ]
    assert.strictEqual(new Set(all).size, all.length)
    for (const one of all) assert.match(one, /^[0-9a-f]{16}$/)
  })
})
