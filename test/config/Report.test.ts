// SPDX-License-Identifier: AGPL-3.0-or-later
import { assert, describe, it } from "@effect/vitest"
import * as Report from "../../src/config/Report.ts"

const origin = { file: "/etc/pepsi/pepsi.conf", line: 3 }

const shown: Report.Shown = {
  diagnostics: [
    { section: "pepsi", option: "LOG", written: "warn", value: "warn", origin, secret: false },
    {
      section: "pepsi",
      option: "DELIMITER",
      written: "",
      value: "",
      origin: undefined,
      secret: false
    },
    {
      section: "pepsi",
      option: "STATE_DIR",
      written: "$PEPSI_HOME",
      value: "/srv/a b ",
      origin: undefined,
      secret: false
    },
    { section: "pepsi-postgres", option: "CONFIG", written: "", value: "", origin, secret: true }
  ],
  warnings: ["/etc/pepsi/pepsi.conf:9: [x] is unknown and ignored"],
  generation: "0123456789abcdef",
  ingress: { DB_POOL_SIZE: 1 },
  dispatch: { DB_POOL_SIZE: 8 },
  pipeline: {
    entries: ["init"],
    sections: new Map([
      ["init", { parallelism: 2 }],
      ["local", { parallelism: 4 }]
    ])
  }
}

const value = (section: string, option: string, expanded = false) =>
  Report.value(shown, { section, option, expanded })

describe("Report", () => {
  it("shows a file", () => {
    assert.deepStrictEqual(Report.show(shown), [
      "[pepsi]",
      "LOG = warn",
      "DELIMITER =",
      'STATE_DIR = "/srv/a b "',
      "",
      "[pepsi-postgres]",
      "# CONFIG is never shown"
    ])
  })

  it("says where each value comes from", () => {
    assert.deepStrictEqual(Report.diagnose(shown), [
      "/etc/pepsi/pepsi.conf:3: [pepsi] LOG = warn",
      "default: [pepsi] DELIMITER = ",
      "default: [pepsi] STATE_DIR = /srv/a b ",
      "/etc/pepsi/pepsi.conf:3: [pepsi-postgres] CONFIG is a secret"
    ])
  })

  it("gives one value by its name, a secret never", () => {
    assert.strictEqual(value("Pepsi", "state_dir"), "$PEPSI_HOME")
    assert.strictEqual(value("pepsi", "STATE_DIR", true), "/srv/a b ")
    assert.strictEqual(value("pepsi-postgres", "CONFIG", true), "")
    assert.strictEqual(value("pepsi", "NONE"), undefined)
  })

  it("counts the database connections that the wiring can need", () => {
    assert.deepStrictEqual(Report.check(shown), [
      "warning: /etc/pepsi/pepsi.conf:9: [x] is unknown and ignored",
      "2 stage sections, mail enters at init",
      "at most 15 database connections: 6 of workers, 8 of the dispatcher, 1 of the SMTP server",
      "generation 0123456789abcdef"
    ])
  })
})
